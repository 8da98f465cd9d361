"""Makes a release: all files in one directory, signed, and optionally pushed to a registry.

The directory appears by one rename when it is complete.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from packaging.requirements import Requirement

from release import (
    artefacts,
    changelog,
    commands,
    git,
    images,
    kustomize,
    oci,
    provenance,
    sbom,
    signatures,
    signing,
    version,
)
from release.errors import ReleaseError
from release.images import Images
from release.olm.products import PRODUCTS
from release.push import Push, Say, push
from release.registry import ADDRESS, RegistryError

SUMS, KEY = "SHA256SUMS", "release.pub"
# The environment of the images: the bill of materials must not depend on the Python that makes it.
_MARKERS = {
    "extra": "",
    "implementation_name": "cpython",
    "implementation_version": "3.11.2",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.2",
    "python_version": "3.11",
    "sys_platform": "linux",
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to release. `prebuilt` has images that are built already; `draft` allows changes that are not committed.

    `push` pushes to `registry`. `trees` limits the rendered manifests.
    """

    root: Path
    out: Path
    version: str
    key: Path
    registry: str
    push: bool = False
    plain_http: bool = False
    ca_file: str = ""
    prebuilt: Path | None = None
    platforms: str = ""
    draft: bool = False
    trees: tuple[str, ...] = ()


def make(plan: Plan, say: Say) -> None:
    """Makes a release. Raises `ReleaseError` before anything is built if the sources or the tools are not ready."""
    notes = check_sources(plan)
    key = signing.load(plan.key)
    kustomize.command()
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    # In the same file system as the result. The complete release is renamed: nobody finds a part of one.
    with tempfile.TemporaryDirectory(prefix=f".{plan.out.name}-", dir=plan.out.parent) as scratch:
        work = Path(scratch)
        complete = work / "out"
        complete.mkdir()
        _write(msgspec.structs.replace(plan, out=complete), key, notes, work, say)
        complete.rename(plan.out)
    if plan.push:
        try:
            push(Push(out=plan.out, plain_http=plan.plain_http, ca_file=plan.ca_file), say)
        except (RegistryError, OSError) as error:
            raise ReleaseError(
                f"{error}\n{plan.out} is complete, but not all of it was pushed; run make push-release"
            ) from error


def _write(plan: Plan, key: ec.EllipticCurvePrivateKey, notes: str, work: Path, say: Say) -> None:
    """Writes all files of a release."""
    started = _now()
    built = _images(plan, work, say)
    listed = images.load(built / "images.json")
    if listed.version != plan.version:
        raise ReleaseError(f"{built}/images.json: found version {listed.version}, expected {plan.version}")
    say("images, manifests, charts and bundles")
    artefacts.merge_images(built, plan.out / "images", listed, plan.registry)
    artefacts.write_json(plan.out / "images.json", artefacts.images_json(listed))
    references = artefacts.image_references(listed, plan.registry)
    (plan.out / "images.txt").write_text("".join(f"{each}\n" for each in references))
    deploy = work / "deploy"
    artefacts.pinned_tree(plan.root / "deploy", deploy, listed, plan.registry)
    artefacts.write_manifests(deploy, plan.out / "manifests", plan.trees or artefacts.trees(deploy))
    _deploy_archive(plan, deploy)
    charts = artefacts.write_charts(deploy, plan.out / "charts", plan.version)
    bundles = _bundles(plan)
    # Last, because these take the longest, and errors in manifests and images are found without them.
    say("wheel and source distribution")
    _python_packages(plan, work)
    say("bills of materials")
    _boms(plan, built, listed)
    (plan.out / "CHANGELOG.md").write_text(notes)
    _facts(plan, charts, bundles)
    signatures.write(plan.out, key)
    say("offline archive")
    _offline(plan, key)
    say("provenance and signatures")
    _sign(plan, key, listed, started)


def check_sources(plan: Plan) -> str:
    """The text of the changelog for the version. Raises `ReleaseError` if the sources are not ready for the release."""
    version.check(plan.version)
    if (found := version.current(plan.root)) != plan.version:
        raise ReleaseError(f"version: found {found} in the source tree, expected {plan.version}; run make version")
    if not ADDRESS.fullmatch(plan.registry):
        raise ReleaseError(
            f"registry: found {plan.registry!a}, expected a host and path such as registry.example/accelplane"
        )
    if plan.out.exists() or plan.out.is_symlink():
        raise ReleaseError(f"{plan.out}: exists already; choose another directory")
    text = (plan.root / "CHANGELOG.md").read_text()
    notes = changelog.section(text, plan.version)
    if plan.draft:
        return notes
    if changes := git.changes(plan.root, "src", "deploy", "release"):
        raise ReleaseError(f"the clone has {len(changes)} changes, such as {changes[0]!a}; commit them, or set DRAFT=1")
    if not changelog.is_dated(text, plan.version):
        raise ReleaseError(
            f"CHANGELOG.md: found no date in ## [{plan.version}]; write it as 2030-01-02, or set DRAFT=1"
        )
    return notes


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _run(command: list[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, umask=0o022,
    )  # fmt: skip
    if done.returncode:
        words = " ".join(map(str, command))
        raise ReleaseError(f"{words}: failed with status {done.returncode}:\n{done.stdout[-4000:]}")


def _images(plan: Plan, work: Path, say: Say) -> Path:
    if plan.prebuilt:
        return plan.prebuilt
    say("building images")
    target = work / "images"
    platforms = [f"PLATFORMS={plan.platforms}"] if plan.platforms else []
    # The variables of this make are not those of the other one.
    without = [word for name in ("MAKEFLAGS", "MAKEOVERRIDES", "IMAGES") for word in ("-u", name)]
    _run(["env", *without, "make", "images", f"OUT={target}", *platforms], plan.root)
    return target


def _python_packages(plan: Plan, work: Path) -> None:
    """Builds the source distribution from a copy, because builds write into the tree, and the wheel from the former."""
    copy = work / "source"
    copy.mkdir()
    for name in ("src", "LICENSE", "README.md", "pyproject.toml"):
        source = plan.root / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignored, copy_function=shutil.copyfile)
        else:
            shutil.copy(source, copy / name)
    # The umask of the clone must not decide the modes in the wheel.
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    environment = {"SOURCE_DATE_EPOCH": str(commands.epoch(plan.root))}
    archive = _built("sdist", copy, plan.out, environment)
    _normalize(archive)
    unpacked = work / "sdist"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    _built("wheel", unpacked / archive.name.removesuffix(".tar.gz"), plan.out, environment)


def _built(distribution: str, source: Path, target: Path, environment: Mapping[str, str]) -> Path:
    """Builds a `wheel` or an `sdist` with the build backend of the project, and returns the file."""
    call = f"import sys; from setuptools.build_meta import build_{distribution} as build; build(sys.argv[1])"
    before = set(target.iterdir())
    _run([sys.executable, "-P", "-c", call, target], source, environment)
    (built,) = set(target.iterdir()) - before
    return built


def _normalize(archive: Path) -> None:
    """Removes times and owners from a source distribution."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isfile() and (stream := tar.extractfile(member)):
                found[member.name] = stream.read()
    archive.write_bytes(oci.compressed(oci.archive(found)))


def _deploy_archive(plan: Plan, deploy: Path) -> None:
    prefix = f"accelplane-{plan.version}-deploy"
    found = {
        f"{prefix}/{file.relative_to(deploy)}": file.read_bytes()
        for file in sorted(deploy.rglob("*"))
        if file.is_file()
    }
    (plan.out / f"{prefix}.tar.gz").write_bytes(oci.compressed(oci.archive(found)))


def _bundles(plan: Plan) -> dict[str, str]:
    """Writes bundles, their images and the catalog, and returns the digests of the images by name."""
    out = plan.out / "olm"
    choices = commands.Choices(
        root=plan.root, out=out, registry=plan.registry, list_of_images=plan.out / "images.json",
        repository=git.origin(plan.root) if not plan.draft else "",
    )  # fmt: skip
    commands.make_bundles(choices)
    commands.make_catalog(choices)
    layouts = {f"{package}-bundle": out / f"{package}-bundle" for package in PRODUCTS}
    layouts["accelplane-catalog"] = out / "catalog-image"
    return {name: oci.root(layout).digest for name, layout in layouts.items()}


def _boms(plan: Plan, built: Path, listed: Images) -> None:
    created = commands.created(plan.root)
    known: dict[str, list[sbom.Package]] = {}
    for image in listed.images:
        purl = f"pkg:oci/{image.name}@{image.digest.replace(':', '%3A')}?repository_url={plan.registry}/{image.name}"
        subject = sbom.Subject(image.name, plan.version, purl, image.digest, created)
        layout = built / image.name
        sbom.write(plan.out / "sbom", subject, sbom.of_image(layout, oci.root(layout), known))
    (wheel,) = plan.out.glob("*.whl")
    subject = sbom.Subject(
        "python-accelplane", plan.version, f"pkg:pypi/accelplane@{plan.version}", oci.file_digest(wheel), created
    )
    lock = (plan.root / "constraints.txt").read_text()
    sbom.write(plan.out / "sbom", subject, sbom.of_lock(lock, dependencies(plan.root)))


def dependencies(root: Path) -> set[str]:
    """All distributions that the package requires on the Python of the images, with the extras of users."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras["operator"], *extras["simulate"])]
    installed = {_normalized(each.name): each.requires or [] for each in metadata.distributions() if each.name}
    required = {
        name: [
            _normalized(each.name)
            for each in map(Requirement, texts)
            if each.marker is None or each.marker.evaluate(_MARKERS)
        ]
        for name, texts in installed.items()
    }
    found = sbom.closure([_normalized(each.name) for each in wanted], required)
    if missing := sorted(found - installed.keys()):
        raise ReleaseError(f"{', '.join(missing)}: not installed, so what it requires is unknown; run make")
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _facts(plan: Plan, charts: Mapping[str, str], bundles: Mapping[str, str]) -> None:
    facts = {
        "version": plan.version,
        "commit": git.commit(plan.root),
        "created": commands.created(plan.root),
        "registry": plan.registry,
        "draft": plan.draft,
        "charts": charts,
        "olm": bundles,
    }
    artefacts.write_json(plan.out / "release.json", facts)


def _offline(plan: Plan, key: ec.EllipticCurvePrivateKey) -> None:
    """Writes the offline archive: images, charts, manifests and the installer, with checksums of their own."""
    prefix = f"accelplane-{plan.version}-offline"
    files: dict[str, Path | bytes] = {
        str(file.relative_to(plan.out)): file
        for each in ("images", "charts", "manifests", signatures.LAYOUT)
        for file in (plan.out / each).rglob("*")
        if file.is_file()
    }
    files |= {each: plan.out / each for each in ("images.json", "images.txt", "release.json", "CHANGELOG.md")}
    files |= {each: Path(__file__).parent / each for each in ("install.py", "registry.py")}
    digests = {name: oci.file_digest(file) for name, file in files.items() if isinstance(file, Path)}
    sums = artefacts.checksum_lines(digests).encode()
    files[SUMS] = sums
    files[f"{SUMS}.der"] = base64.b64decode(signing.sign(key, sums))
    epoch = commands.epoch(plan.root)
    with tarfile.open(plan.out / f"{prefix}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files, key=artefacts.path_order):
            file = files[name]
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.mode = 0o755 if name == "install.py" else 0o644
            member.mtime = epoch
            with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as stream:
                member.size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                tar.addfile(member, stream)


def _sign(plan: Plan, key: ec.EllipticCurvePrivateKey, listed: Images, started: str) -> None:
    platforms = tuple(sorted({platform for image in listed.images for platform in image.platforms}))
    build = provenance.Build(
        version=plan.version,
        registry=plan.registry,
        platforms=platforms,
        prebuilt=plan.prebuilt is not None,
        builder=os.environ.get("RELEASE_BUILDER", "urn:accelplane:local-build"),
        started=started,
        finished=_now(),
    )
    statement = provenance.statement(plan.root, subjects(plan.out), build)
    (plan.out / "provenance.json").write_bytes(statement)
    (plan.out / "provenance.dsse.json").write_bytes(signing.envelope(key, statement))
    (plan.out / KEY).write_bytes(signing.public_text(key))
    sums = artefacts.checksums(plan.out)
    (plan.out / SUMS).write_text(sums)
    (plan.out / f"{SUMS}.sig").write_text(signing.sign(key, sums.encode()))


def subjects(out: Path) -> dict[str, str]:
    """The results that provenance is about, with their digests: files, images, charts and bundles."""
    facts = json.loads((out / "release.json").read_text())
    listed = images.load(out / "images.json")
    files = [file for pattern in ("*.whl", "*.tar.gz", "*.tar", "charts/*.tgz") for file in out.glob(pattern)]
    return {
        **{str(file.relative_to(out)): oci.file_digest(file) for file in files},
        **{f"{facts['registry']}/{name}": digest for name, digest in listed.digests.items()},
        **{f"{facts['registry']}/charts/{name}": digest for name, digest in facts["charts"].items()},
        **{f"{facts['registry']}/{name}": digest for name, digest in facts["olm"].items()},
    }
