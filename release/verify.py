"""`make verify-release`: checks a release as its users would, with their own copy of the public key."""

import base64
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import msgspec
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from packaging.version import Version

from release import artefacts, charts, images, oci, provenance, signatures, signing
from release.build import SUMS, subjects
from release.errors import ReleaseError
from release.kustomize import load_yaml
from release.olm import bundle, catalog, checks
from release.olm.products import PRODUCTS
from release.registry import Registry, RegistryError


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A release in a directory, the key and the version that its user expects, and the registry to check, if any.

    An older release has a valid signature too. `draft` accepts one that was built from changes that are not committed.
    """

    out: Path
    key: Path
    version: str
    draft: bool = False
    registry: str = ""
    plain_http: bool = False
    ca_file: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """`release.json`."""
        return json.loads((self.out / "release.json").read_text())

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """The trusted key."""
        return signing.load_public(self.key)


class Result(msgspec.Struct, frozen=True):
    """The result of a check. `problem` is empty if there is none; `text` says what was checked."""

    name: str
    text: str
    problem: str = ""


def verify(release: Release) -> Iterator[Result]:
    """Runs all checks. They end if the signature or the checksums fail, because nothing else can be trusted then."""
    for name, check in CHECKS.items():
        if name in _REGISTRY_CHECKS and not release.registry:
            continue
        try:
            yield Result(name, check(release))
        except _ERRORS as error:
            yield Result(name, "", _problem(error))
            if name in _FIRST_CHECKS:
                return


def _problem(error: Exception) -> str:
    """The message of an error. Those of Python do not say what they are about."""
    if isinstance(error, ReleaseError | RegistryError | OSError):
        return str(error)
    return f"found a file with another form than that of a release: {error!r}"


def signature(release: Release) -> str:
    """The signature of the checksums fits to the trusted key."""
    text = (release.out / SUMS).read_bytes()
    signing.verify(release.public_key, text, (release.out / f"{SUMS}.sig").read_text(), SUMS)
    return f"{SUMS} is signed by {release.key}"


def checksums(release: Release) -> str:
    """Every file has its checksum, and no other files exist."""
    lines = (release.out / SUMS).read_text().splitlines()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    own = {SUMS, f"{SUMS}.sig"}
    found = {str(file.relative_to(release.out)) for file in release.out.rglob("*") if not _is_directory(file)} - own
    if others := found ^ set(expected):
        raise ReleaseError(f"{min(others)}: found in the directory or in {SUMS} only")
    for name, digest in expected.items():
        file = release.out / name
        if file.is_symlink() or not file.is_file():
            raise ReleaseError(f"{name}: found a link or a special file, expected a regular file")
        if oci.file_digest(file) != f"sha256:{digest}":
            raise ReleaseError(f"{name}: found other content than that of {SUMS}")
    return f"{len(expected)} files"


def expected_release(release: Release) -> str:
    """The release has the expected version, and is no draft."""
    facts = release.facts
    if facts["version"] != release.version:
        raise ReleaseError(f"release.json: found version {facts['version']}, expected {release.version}")
    if facts["draft"] and not release.draft:
        raise ReleaseError("release.json: found a draft, expected a release of a commit; use --draft to accept it")
    return f"version {release.version}{', a draft' if facts['draft'] else ''}"


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _only(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        raise ReleaseError(f"{pattern}: found {len(found)} files, expected one")
    return found[0]


def python_packages(release: Release) -> str:
    """Wheel and source distribution have the version."""
    version = release.facts["version"]
    wheel, source = _only(release.out, "*.whl"), _only(release.out, "accelplane-*[0-9].tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        found = [HeaderParser().parsestr(archive.read(name).decode())["Version"]]
    with tarfile.open(source) as archive:
        (member,) = [
            each for each in archive.getmembers() if each.name.count("/") == 1 and each.name.endswith("/PKG-INFO")
        ]
        stream = archive.extractfile(member)
        found.append(HeaderParser().parsestr(stream.read().decode() if stream else "")["Version"])
    # Python writes 1.1.0-rc.1 as 1.1.0rc1.
    if {Version(each) for each in found} != {Version(version)}:
        raise ReleaseError(f"{wheel.name}, {source.name}: found the versions {found}, expected {version}")
    return f"{wheel.name}, {source.name}"


def image_layout(release: Release) -> str:
    """Every blob of every image has its digest, and the lists name the same images."""
    listed = images.load(release.out / "images.json")
    index = json.loads((release.out / "images/index.json").read_text())
    entries = msgspec.convert(index["manifests"], list[oci.Descriptor])
    found: set[str] = set()
    for digest in {each.digest: each for each in entries}.values():
        for descriptor, content in oci.walk(release.out / "images", digest):
            file = oci.blob(release.out / "images", descriptor.digest)
            if content is None and descriptor.digest not in found and oci.file_digest(file) != descriptor.digest:
                raise ReleaseError(f"images: blob {descriptor.digest}: found other content")
            found.add(descriptor.digest)
    stored = {file.name for file in (release.out / "images/blobs/sha256").iterdir()}
    if others := stored ^ {digest.removeprefix("sha256:") for digest in found}:
        raise ReleaseError(f"images: found the blob {min(others)} without use, or did not find it")
    registry = release.facts["registry"]
    expected = artefacts.image_references(listed, registry)
    if (release.out / "images.txt").read_text().split() != expected:
        raise ReleaseError("images.txt: found other images than in images.json")
    names = {(each.annotations or {}).get(oci.REF_NAME): each.digest for each in entries}
    if {name: digest for name, digest in names.items() if name} != {
        f"{name}:{listed.version}": digest for name, digest in listed.digests.items()
    }:
        raise ReleaseError("images/index.json: found other images than in images.json")
    return f"{len(listed.images)} images, {len(found)} blobs"


def helm_charts(release: Release) -> str:
    """The charts have the version and the digests of the list, and the artefacts contain the archives."""
    facts = release.facts
    digests = charts.digests_template(images.load(release.out / "images.json").digests)
    for name, digest in facts["charts"].items():
        archive = release.out / f"charts/{name}-{facts['version']}.tgz"
        layout = release.out / "charts/oci"
        manifest = json.loads(oci.blob(layout, digest).read_bytes())
        if manifest["layers"][0]["digest"] != oci.file_digest(archive):
            raise ReleaseError(f"{archive.name}: found other content than in the artefact {digest}")
        with tarfile.open(archive) as tar:
            chart = load_yaml(_member(tar, f"{name}/Chart.yaml"))
            templates = [each for each in tar.getnames() if each.endswith(f"/{charts.DIGESTS}")]
            others = [each for each in templates if _member(tar, each) != digests]
            values = load_yaml(_member(tar, f"{name}/values.yaml"))
        if not templates or others:
            raise ReleaseError(f"{archive.name}: {charts.DIGESTS}: found other digests than in images.json, or none")
        if (hubs := set(_hubs(values))) != {facts["registry"]}:
            raise ReleaseError(f"{archive.name}: found the registries {sorted(hubs)}, expected {facts['registry']}")
        if (chart["version"], chart["appVersion"]) != (facts["version"], facts["version"]):
            raise ReleaseError(f"{archive.name}: found version {chart['version']}, expected {facts['version']}")
    return f"{len(facts['charts'])} charts"


def _hubs(values: Any) -> Iterator[str]:
    """The registries in the values of a chart."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key == "hub":
            yield str(value)
        else:
            yield from _hubs(value)


def _member(tar: tarfile.TarFile, name: str) -> str:
    """The text of a file in an archive."""
    stream = tar.extractfile(name)
    if stream is None:
        raise ReleaseError(f"{name}: found no regular file in the archive")
    return stream.read().decode()


def manifests(release: Release) -> str:
    """All images of the registry in manifests have the digests of the list."""
    registry = release.facts["registry"]
    expected = set(artefacts.image_references(images.load(release.out / "images.json"), registry))
    count = 0
    for file in sorted((release.out / "manifests").rglob("*.yaml")):
        for reference in artefacts.references_of(file.read_text(), registry):
            count += 1
            if reference not in expected:
                raise ReleaseError(
                    f"{file.relative_to(release.out)}: found {reference}, expected a digest of images.json"
                )
    if not count:
        raise ReleaseError("manifests: found no images")
    return f"{count} images by digest"


def olm_bundles(release: Release) -> str:
    """Bundles and catalog have no problems, and name the images of the list."""
    digests = images.load(release.out / "images.json").digests
    registry = release.facts["registry"]
    problems: list[str] = []
    for package in PRODUCTS:
        content = bundle.read(release.out / "olm" / package)
        problems += checks.bundle_problems(content)
        version = load_yaml(content[bundle.parts(content)[0]])
        for each in version["spec"]["relatedImages"]:
            if each["image"] != f"{registry}/{each['name']}@{digests.get(each['name'])}":
                problems.append(f"{package}: found the image {each['image']}, expected a digest of images.json")
    blobs = catalog.read(release.out / "olm/catalog")
    problems += checks.catalog_problems(blobs)
    pinned = {f"{registry}/{name}@{digest}" for name, digest in release.facts["olm"].items()}
    problems += [
        f"catalog: found the bundle {each['image']}, expected one of release.json"
        for each in blobs
        if each["schema"] == "olm.bundle" and each["name"].endswith(f".v{release.facts['version']}")
        if each["image"] not in pinned
    ]
    for name, digest in release.facts["olm"].items():
        layout = artefacts.olm_layout(release.out, name)
        oci.verify(layout)
        if oci.root(layout).digest != digest:
            problems.append(f"{name}: found digest {oci.root(layout).digest}, expected {digest}")
    if problems:
        raise ReleaseError("\n".join(problems))
    return f"{len(PRODUCTS)} bundles and a catalog"


def bills_of_materials(release: Release) -> str:
    """Each image and the wheel have both documents, with the right digest and the same packages."""
    wheel = _only(release.out, "*.whl")
    expected = {each.name: each.digest for each in images.load(release.out / "images.json").images}
    expected["python-accelplane"] = oci.file_digest(wheel)
    count = 0
    for name, digest in expected.items():
        spdx = json.loads((release.out / f"sbom/{name}.spdx.json").read_text())
        cyclonedx = json.loads((release.out / f"sbom/{name}.cdx.json").read_text())
        root, *packages = spdx["packages"]
        found = (root["checksums"][0]["checksumValue"], cyclonedx["metadata"]["component"]["hashes"][0]["content"])
        if set(found) != {digest.removeprefix("sha256:")}:
            raise ReleaseError(f"sbom/{name}: found the digests {found}, expected {digest}")
        listed = {each["externalRefs"][0]["referenceLocator"] for each in packages}
        if listed != {each["purl"] for each in cyclonedx["components"]} or not listed:
            raise ReleaseError(f"sbom/{name}: found {len(listed)} packages that differ between the formats")
        count += len(listed)
    return f"{len(expected)} subjects, {count} packages"


def origin(release: Release) -> str:
    """The provenance is signed, and is about all results."""
    envelope = (release.out / "provenance.dsse.json").read_bytes()
    statement = signing.opened(release.public_key, envelope, "provenance.dsse.json")
    if statement != (release.out / "provenance.json").read_bytes():
        raise ReleaseError("provenance.json: found another statement than in the signed envelope")
    parsed = json.loads(statement)
    if (parsed["_type"], parsed["predicateType"]) != (provenance.STATEMENT, provenance.PREDICATE):
        raise ReleaseError(f"provenance.json: found the types {parsed['_type']}, {parsed['predicateType']}")
    found = {each["name"]: f"sha256:{each['digest']['sha256']}" for each in parsed["subject"]}
    expected = subjects(release.out)
    if different := {name for name in found | expected if found.get(name) != expected.get(name)}:
        raise ReleaseError(f"provenance.json: {min(different)}: found another digest, or no entry")
    commit = parsed["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
    if commit != release.facts["commit"]:
        raise ReleaseError(f"provenance.json: found commit {commit}, expected {release.facts['commit']}")
    return f"{len(found)} subjects, commit {commit}"


def artefact_signatures(release: Release) -> str:
    """Every artefact has a signature by the trusted key, under its own name and digest, and no others exist."""
    layout, known = release.out / signatures.LAYOUT, signatures.load(release.out)
    registry, key = release.facts["registry"], release.public_key
    for name, _, digest in artefacts.registry_artefacts(release.out):
        descriptor = signatures.find(known, name, digest)
        manifest = oci.checked(layout, descriptor)
        content = oci.blob(layout, json.loads(manifest)["layers"][0]["digest"]).read_bytes()
        signatures.check(key, manifest, content, f"{registry}/{name}", digest)
    stored = {f"sha256:{file.name}" for file in (layout / "blobs/sha256").iterdir()}
    if others := stored ^ set(signatures.blobs(release.out, known)):
        raise ReleaseError(f"{signatures.LAYOUT}: found the blob {min(others)} without use, or did not find it")
    return f"{len(known)} signatures"


def offline_archive(release: Release) -> str:
    """The archive for installations without network has the same files, and its own checksums are signed."""
    name = f"accelplane-{release.facts['version']}-offline"
    digests: dict[str, str] = {}
    signed: dict[str, bytes] = {}
    with tarfile.open(release.out / f"{name}.tar") as tar:
        for member in tar:
            file = member.name.removeprefix(f"{name}/")
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None or file == member.name or file in digests | signed or ".." in file.split("/"):
                raise ReleaseError(f"{name}.tar: found the member {member.name!a}, expected files below {name}, once")
            if file in {SUMS, f"{SUMS}.der"}:
                signed[file] = stream.read()
            else:
                digests[file] = oci.stream_digest(stream)
    if len(signed) < 2:
        raise ReleaseError(f"{name}.tar: found {sorted(signed)}, expected {SUMS} and its signature")
    sums, encoded = signed[SUMS], signed[f"{SUMS}.der"]
    signing.verify(release.public_key, sums, base64.b64encode(encoded).decode(), f"{name}/{SUMS}")
    if artefacts.checksum_lines(digests).encode() != sums:
        raise ReleaseError(f"{name}: found other files than in its {SUMS}")
    for file, digest in digests.items():
        if file not in {"install.py", "registry.py"} and digest != oci.file_digest(release.out / file):
            raise ReleaseError(f"{name}/{file}: found other content than in the release")
    return f"{name}.tar, {len(digests)} files"


def _registry(release: Release) -> Registry:
    return Registry(release.registry, plain_http=release.plain_http, ca_file=release.ca_file)


def registry_digests(release: Release) -> str:
    """Tags in the registry have the digests of the release, and all manifests and blobs can be pulled."""
    registry, count = _registry(release), 0
    version = release.facts["version"]
    seen: set[str] = set()
    for name, _, digest in artefacts.registry_artefacts(release.out):
        content, _ = registry.manifest(name, version)
        if oci.digest_of(content) != digest:
            raise ReleaseError(
                f"{release.registry}/{name}:{version}: found {oci.digest_of(content)}, expected {digest}"
            )
        pending = [digest]
        while pending:
            parsed = json.loads(registry.manifest(name, pending.pop())[0])
            pending += [each["digest"] for each in parsed.get("manifests", [])]
            for each in (*parsed.get("layers", []), *([parsed["config"]] if "config" in parsed else [])):
                if each["digest"] not in seen:
                    seen.add(each["digest"])
                    registry.blob(name, each["digest"], each["size"])
        count += 1
    return f"{count} artefacts, {len(seen)} blobs"


def registry_signatures(release: Release) -> str:
    """Every artefact in the registry is signed by the trusted key, under its own name and digest."""
    registry, count = _registry(release), 0
    for name, _, digest in artefacts.registry_artefacts(release.out):
        manifest = registry.manifest(name, signing.signature_tag(digest))[0]
        content = registry.blob(name, json.loads(manifest)["layers"][0]["digest"])
        signatures.check(release.public_key, manifest, content, f"{release.facts['registry']}/{name}", digest)
        count += 1
    return f"{count} signatures"


CHECKS: dict[str, Callable[[Release], str]] = {
    "signature": signature,
    "checksums": checksums,
    "version": expected_release,
    "python packages": python_packages,
    "images": image_layout,
    "charts": helm_charts,
    "manifests": manifests,
    "bundles": olm_bundles,
    "bills of materials": bills_of_materials,
    "provenance": origin,
    "artefact signatures": artefact_signatures,
    "offline archive": offline_archive,
    "registry": registry_digests,
    "registry signatures": registry_signatures,
}
_ERRORS = (
    *(ReleaseError, RegistryError, OSError, ValueError, KeyError, TypeError, IndexError),
    *(zipfile.BadZipFile, tarfile.TarError, yaml.YAMLError, msgspec.ValidationError),
)
_FIRST_CHECKS = {"signature", "checksums"}
_REGISTRY_CHECKS = {"registry", "registry signatures"}
