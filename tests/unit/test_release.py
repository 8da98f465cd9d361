"""Releases with small images: content, and detection of every change."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import memorydirectory
import ociregistry
import pytest
import yaml
from charts import KUBE_VERSION, run_helm
from manifests import REPOSITORY, flag_values, kubectl
from releases import METADATA, STATUS, VERSION, names, write_images

from accelplane.cli.operator import FLAGS, options
from accelplane.manifests.spans import EditError
from accelplane.operator.images import pinned
from release import artefacts, build, git, images, oci, sbom, signatures, signing, verify
from release.errors import ReleaseError
from release.kustomize import load_yaml
from release.olm.products import PLUGIN_IMAGES
from release.push import Push, push
from release.registry import Registry, RegistryError

pytestmark = pytest.mark.memory

# No registry listens there.
REGISTRY = "localhost:1/accelplane"
TREES = ("gpu_plugin", "operator/default", "onload/config/default")
NAME = f"accelplane-{VERSION}"


def plan(root: Path, out: Path, **fields: object) -> build.Plan:
    settings = {"version": VERSION, "registry": REGISTRY, "prebuilt": root / "images", "draft": True, "trees": TREES}
    return build.Plan(root=REPOSITORY, out=out, key=root / "key", **{**settings, **fields})  # pyright: ignore


@pytest.fixture(scope="module")
def release_directory() -> Path:
    """A directory with images, a key, and the release `out`. It is the same one in all processes."""
    return memorydirectory.build_once("release", _build_release)


def _build_release(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECTL", kubectl())
        patch.setenv("SOURCE_DATE_EPOCH", "1893553445")
        write_images(root / "images")
        signing.generate(root / "key")
        build.make(plan(root, root / "out"), lambda _: None)


@pytest.fixture
def copy(release_directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(release_directory / "out", tmp_path / "out")
    return tmp_path / "out"


def failures(out: Path, key: Path, **fields: object) -> dict[str, str]:
    found = verify.verify(verify.Release(out=out, key=key, **fields))  # pyright: ignore
    return {each.name: each.problem for each in found if each.problem}


def test_a_release_passes_all_checks(release_directory: Path) -> None:
    found = list(verify.verify(verify.Release(out=release_directory / "out", key=release_directory / "key.pub")))
    assert [(each.name, each.problem) for each in found if each.problem] == []
    assert [each.name for each in found] == list(verify.CHECKS)[:-2]


def test_a_release_has_all_files(release_directory: Path) -> None:
    assert {file.name for file in (release_directory / "out").iterdir()} == {
        *("CHANGELOG.md", "SHA256SUMS", "SHA256SUMS.sig", "release.pub", "release.json", "images.json", "images.txt"),
        *("provenance.json", "provenance.dsse.json", "images", "charts", "manifests", "olm", "sbom", "signatures"),
        *(f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz", f"{NAME}-deploy.tar.gz", f"{NAME}-offline.tar"),
    }
    assert {f"{name}:{VERSION}" for name in names()} == {
        line.removeprefix(f"{REGISTRY}/").partition("@")[0]
        for line in (release_directory / "out/images.txt").read_text().split()
    }


def test_manifests_name_images_by_digest(release_directory: Path) -> None:
    (daemonset,) = yaml.safe_load_all((release_directory / "out/manifests/gpu_plugin.yaml").read_text())
    digest = oci.root(release_directory / "images/intel-gpu-plugin").digest
    image = daemonset["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"{REGISTRY}/intel-gpu-plugin:{VERSION}@{digest}"


def test_the_operator_of_a_release_pins_the_images_of_its_plugins(release_directory: Path) -> None:
    objects = yaml.load_all((release_directory / "out/manifests/operator/default.yaml").read_text(), yaml.CSafeLoader)
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    policy = options(flag_values(FLAGS, container), environment).settings.images
    expected = {line.partition("@")[0]: line for line in (release_directory / "out/images.txt").read_text().split()}
    for name in PLUGIN_IMAGES:
        default = policy.reference(name)
        assert pinned(default, policy) == expected[default]
        # The tag in a mirror, or another tag, is that of another image.
        for other in (f"mirror.example/{name}:{VERSION}", f"{REGISTRY}/{name}:1.0.1", f"{REGISTRY}/{name}:devel"):
            assert pinned(other, policy) == other


def test_charts_pin_images_by_digest_unless_another_tag_is_chosen(release_directory: Path) -> None:
    chart = release_directory / f"out/charts/accelplane-{VERSION}.tgz"
    expected = (release_directory / "out/images.txt").read_text().split()

    def rendered(values: str) -> str:
        return run_helm("template", "x", chart, "--kube-version", KUBE_VERSION, "--set", values)

    everything = rendered("components.operator=true,components.fleet=true,components.onload=true")
    found = set(artefacts.references_of(everything, REGISTRY))
    assert found <= set(expected)
    # With the images of the plugins, which the operator pins.
    assert len(found) == 5 + len(PLUGIN_IMAGES)
    assert f"--image-vendor={REGISTRY}" in everything
    mirrored = rendered("agent.image.hub=mirror.example/a")
    assert expected[0].replace(REGISTRY, "mirror.example/a") in mirrored
    other = set(artefacts.references_of(rendered("agent.image.tag=1.0.1"), REGISTRY))
    assert other == {f"{REGISTRY}/accelplane:1.0.1"}


def test_charts_with_other_digests_or_registries_are_found(copy: Path, release_directory: Path) -> None:
    release = verify.Release(out=copy, key=release_directory / "key.pub")
    listed = (copy / "images.json").read_text()
    digest = images.load(copy / "images.json").images[0].digest
    (copy / "images.json").write_text(listed.replace(digest, OTHER))
    with pytest.raises(ReleaseError, match=r"found other digests than in images\.json, or none"):
        verify.helm_charts(release)
    (copy / "images.json").write_text(listed)
    _replace("release.json", REGISTRY, "other.example/a")(copy)
    with pytest.raises(ReleaseError, match=f"found the registries .'{REGISTRY}'., expected other.example/a"):
        verify.helm_charts(release)


def test_charts_have_the_registry(release_directory: Path) -> None:
    with tarfile.open(release_directory / f"out/charts/accelplane-{VERSION}.tgz") as tar:
        values = tar.extractfile("accelplane/values.yaml")
        assert values
        assert load_yaml(values.read().decode())["agent"]["image"]["hub"] == REGISTRY
        assert "accelplane/charts/intel-device-plugins-operator/Chart.yaml" in tar.getnames()


def test_two_releases_differ_only_in_times_and_signatures(
    release_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECTL", kubectl())
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1893553445")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        # The release is complete before anything is pushed.
        with pytest.raises(ReleaseError, match="is complete, but not all of it was pushed; run make push-release"):
            build.make(plan(release_directory, tmp_path / "again", push=True), lambda _: None)
    finally:
        os.umask(before)
    first, second = (
        (each / "SHA256SUMS").read_text().splitlines() for each in (release_directory / "out", tmp_path / "again")
    )
    different = {line.split("  ")[1] for line in set(first) ^ set(second)}
    # The offline archive has a signature, and ECDSA signatures are random.
    others = {name for name in different if not name.startswith("signatures/")}
    assert others == {"provenance.json", "provenance.dsse.json", f"{NAME}-offline.tar"}


def test_a_failed_release_leaves_no_files(
    release_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECTL", kubectl())
    write_images(tmp_path / "images", ("accelplane",))
    with pytest.raises(EditError, match="found no digest"):
        build.make(plan(release_directory, tmp_path / "out/new", prebuilt=tmp_path / "images"), lambda _: None)
    assert list((tmp_path / "out").iterdir()) == []


# Detection by verify-release.


def sign_again(out: Path, release_directory: Path) -> None:
    sums = out / "SHA256SUMS"
    for file in (sums, out / "SHA256SUMS.sig"):
        file.unlink()
    text = artefacts.checksums(out)
    sums.write_text(text)
    (out / "SHA256SUMS.sig").write_text(signing.sign(signing.load(release_directory / "key"), text.encode()))


@pytest.mark.parametrize(
    "name", [f"{NAME}-py3-none-any.whl", "manifests/gpu_plugin.yaml", f"charts/accelplane-{VERSION}.tgz", "images.txt"]
)
def test_a_changed_file_is_detected(name: str, copy: Path, release_directory: Path) -> None:
    with (copy / name).open("ab") as stream:
        stream.write(b" ")
    assert (
        failures(copy, release_directory / "key.pub")["checksums"]
        == f"{name}: found other content than that of SHA256SUMS"
    )


def test_missing_and_additional_files_are_found(copy: Path, release_directory: Path) -> None:
    (copy / "other").write_text("")
    assert failures(copy, release_directory / "key.pub") == {
        "checksums": "other: found in the directory or in SHA256SUMS only"
    }
    (copy / "other").unlink()
    (copy / "CHANGELOG.md").unlink()
    assert "CHANGELOG.md: found in" in failures(copy, release_directory / "key.pub")["checksums"]


def test_a_release_with_another_key_is_rejected(copy: Path, release_directory: Path, tmp_path: Path) -> None:
    signing.generate(tmp_path / "other")
    expected = {"signature": "SHA256SUMS: the signature does not fit to the content and the key"}
    assert failures(copy, tmp_path / "other.pub") == expected
    # The public key in the release is not trusted.
    shutil.copy(tmp_path / "other.pub", copy / "release.pub")
    text = artefacts.checksums(copy)
    (copy / "SHA256SUMS").write_text(text)
    (copy / "SHA256SUMS.sig").write_text(signing.sign(signing.load(tmp_path / "other"), text.encode()))
    assert failures(copy, release_directory / "key.pub") == expected


def _replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(out: Path) -> None:
        text = (out / name).read_text()
        assert old in text
        (out / name).write_text(text.replace(old, new))

    return apply


def _blob(out: Path) -> None:
    file = max((out / "images/blobs/sha256").iterdir(), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes() + b"x")


def _offline(out: Path) -> None:
    file = out / f"{NAME}-offline.tar"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"spec:", b"spec :", 1))


def _signature(out: Path) -> None:
    signing.generate(out.parent / "other")
    signatures.write(out, signing.load(out.parent / "other"))
    # Without the blobs of the first signatures, which nothing refers to now.
    used = {digest.removeprefix("sha256:") for digest in signatures.blobs(out, signatures.load(out))}
    for file in (out / "signatures/blobs/sha256").iterdir():
        if file.name not in used:
            file.unlink()


OTHER = f"sha256:{'0' * 64}"
SIGNED_CHANGES: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "image": (_blob, {"images"}),
    "list": (_replace("images.txt", "intel-gpu-plugin", "intel-gpu-other"), {"images"}),
    "unused blob": (lambda out: (out / "images/blobs/sha256/x").write_text(""), {"images"}),
    "manifest": (_replace("manifests/gpu_plugin.yaml", "@sha256:", "@sha256:0"), {"manifests"}),
    "manifest by tag": (_replace("manifests/gpu_plugin.yaml", f":{VERSION}@sha256", ":latest@sha256"), {"manifests"}),
    "chart": (lambda out: shutil.copy(out / f"charts/intel-device-plugins-sgx-{VERSION}.tgz",
                                      out / f"charts/intel-device-plugins-gpu-{VERSION}.tgz"),
              {"charts", "provenance"}),
    "bundle": (_replace("olm/onload-operator/manifests/onload-operator.clusterserviceversion.yaml",
                        "onload-device-plugin@sha256:", "onload-device-plugin@sha256:0"), {"bundles"}),
    "catalog": (_replace("olm/catalog/onload-operator/catalog.yaml", "onload-operator-bundle@sha256:",
                         "onload-operator-bundle@sha256:0"), {"bundles"}),
    "bill of materials": (_replace("sbom/accelplane.spdx.json", "msgspec@0.20.0", "msgspec@0.20.1"),
                          {"bills of materials"}),
    "digest of a bill": (_replace("sbom/accelplane.cdx.json", '"content": "', '"content": "0'),
                         {"bills of materials"}),
    "provenance": (_replace("provenance.json", "gitCommit", "gitcommit"), {"provenance"}),
    "commit": (_replace("release.json", '"commit": "', '"commit": "0'), {"provenance", "offline archive"}),
    "signature": (_replace("signatures/index.json", "onload-operator-bundle:", "x:"), {"artefact signatures"}),
    "signature of another key": (_signature, {"artefact signatures"}),
    "unused signature": (lambda out: (out / "signatures/blobs/sha256/x").write_text(""), {"artefact signatures"}),
    "offline archive": (_offline, {"provenance", "offline archive"}),
    "wheel": (lambda out: (out / f"{NAME}-py3-none-any.whl").write_bytes(b"x"),
              {"python packages", "provenance", "bills of materials"}),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), SIGNED_CHANGES.values(), ids=list(SIGNED_CHANGES))
def test_a_signed_inconsistent_release_is_detected(
    change: Callable[[Path], None], expected: set[str], copy: Path, release_directory: Path
) -> None:
    change(copy)
    sign_again(copy, release_directory)
    found = failures(copy, release_directory / "key.pub")
    assert expected <= set(found), found
    assert set(found) <= expected | {"offline archive"}


# Sources.


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "src/accelplane").mkdir(parents=True)
    (root / "src/accelplane/__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    (root / "CHANGELOG.md").write_text(f"## [{VERSION}] - 2030-01-02\n\n- a\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    return root


def test_sources_of_a_release_are_clean_dated_and_described(clone: Path, tmp_path: Path) -> None:
    def check(**fields: object) -> str:
        settings = {"version": VERSION, "out": tmp_path / "out", **fields}
        return build.check_sources(build.Plan(root=clone, key=tmp_path / "key", **settings))  # pyright: ignore

    assert check() == "- a\n"
    with pytest.raises(ReleaseError, match=r"found '1\.0', expected a semantic version"):
        check(version="1.0")
    with pytest.raises(ReleaseError, match="run make version"):
        check(version="9.9.9")
    with pytest.raises(ReleaseError, match="exists already"):
        check(out=clone)
    (clone / "new").write_text("")
    with pytest.raises(ReleaseError, match=r"has 1 changes, such as '\?\? new'"):
        check()
    assert check(draft=True) == "- a\n"
    (clone / "new").unlink()
    (clone / "CHANGELOG.md").write_text(f"## [{VERSION}] - unreleased\n\n- a\n")
    with pytest.raises(ReleaseError, match="has 1 changes"):
        check()
    subprocess.run(["git", "update-index", "--assume-unchanged", "CHANGELOG.md"], cwd=clone, check=True)
    with pytest.raises(ReleaseError, match="found no date"):
        check()


def test_addresses_of_repositories_have_no_credentials(clone: Path) -> None:
    assert git.origin(clone) == ""
    address = "https://user:secret@git.example/a.git"
    subprocess.run(["git", "remote", "add", "origin", address], cwd=clone, check=True)
    assert git.origin(clone) == "https://git.example/a.git"


def test_images_that_differ_from_their_list_are_an_error(tmp_path: Path) -> None:
    listed = artefacts.Images(VERSION, ())
    write_images(tmp_path / "images", ("accelplane",))
    file = oci.blob(tmp_path / "images/accelplane", oci.root(tmp_path / "images/accelplane").digest)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ReleaseError, match="found other content"):
        oci.verify(tmp_path / "images/accelplane")
    assert listed.digests == {}


# Bills of materials.


def layer(files: dict[str, str]) -> bytes:
    return oci.compressed(oci.archive({name: text.encode() for name, text in files.items()}))


def test_packages_of_images_are_found(tmp_path: Path) -> None:
    removed = STATUS.replace("libc6", "gone").replace("install ok installed", "deinstall ok config-files")
    several = f"{STATUS}\n{removed}\n{STATUS.replace('libc6', 'libz').replace('2.36-9', '1:1.2+b1')}"
    content = {"var/lib/dpkg/status": several, "usr/lib/python3/x-1.dist-info/METADATA": METADATA, "etc/status": "x"}
    oci.put(tmp_path, layer(content), oci.LAYER)
    image = {"schemaVersion": 2, "layers": [oci.put(tmp_path, layer(content), oci.LAYER).json]}
    found = sbom.of_image(tmp_path, oci.put(tmp_path, oci.encoded(image), oci.MANIFEST), {})
    assert [each.purl for each in found] == [
        "pkg:deb/debian/libc6@2.36-9?arch=amd64",
        "pkg:deb/debian/libz@1%3A1.2%2Bb1?arch=amd64",
        "pkg:pypi/msgspec@0.20.0",
    ]
    assert found[2].license == "BSD-3-Clause"


def test_a_layer_that_is_not_an_archive_is_an_error(tmp_path: Path) -> None:
    image = {"schemaVersion": 2, "layers": [oci.put(tmp_path, b"x", oci.LAYER).json]}
    with pytest.raises(ReleaseError, match="expected a layer as a compressed tar archive"):
        sbom.of_image(tmp_path, oci.put(tmp_path, oci.encoded(image), oci.MANIFEST), {})


def test_the_wheel_lists_pinned_dependencies(release_directory: Path) -> None:
    document = json.loads((release_directory / "out/sbom/python-accelplane.cdx.json").read_text())
    found = {each["name"] for each in document["components"]}
    assert {"msgspec", "cryptography", "cffi", "grpcio"} <= found
    assert not found & {"pytest", "ruff", "pyright"}
    with pytest.raises(ReleaseError, match="found no pin of other; run make lock"):
        sbom.of_lock((REPOSITORY / "constraints.txt").read_text(), ["other"])


def test_documents_have_the_fields_of_their_formats(release_directory: Path) -> None:
    spdx = json.loads((release_directory / "out/sbom/intel-gpu-plugin.spdx.json").read_text())
    identities = {each["SPDXID"] for each in spdx["packages"]} | {"SPDXRef-DOCUMENT"}
    for each in spdx["relationships"]:
        assert {each["spdxElementId"], each["relatedSpdxElement"]} <= identities
    assert (spdx["spdxVersion"], spdx["dataLicense"]) == ("SPDX-2.3", "CC0-1.0")
    assert spdx["creationInfo"]["created"] == "2030-01-02T03:04:05Z"
    cyclonedx = json.loads((release_directory / "out/sbom/intel-gpu-plugin.cdx.json").read_text())
    assert (cyclonedx["bomFormat"], cyclonedx["specVersion"]) == ("CycloneDX", "1.6")
    references = [each["bom-ref"] for each in cyclonedx["components"]]
    assert len(references) == len(set(references)) == 2
    assert cyclonedx["dependencies"][0]["dependsOn"] == references


# Keys and signatures.


def test_keys_can_be_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.PASSWORD, "secret")
    signing.generate(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert b"ENCRYPTED" in (tmp_path / "key").read_bytes()
    signature = signing.sign(signing.load(tmp_path / "key"), b"x")
    signing.verify(signing.load_public(tmp_path / "key.pub"), b"x", signature, "x")
    with pytest.raises(ReleaseError, match="the signature does not fit"):
        signing.verify(signing.load_public(tmp_path / "key.pub"), b"y", signature, "x")
    monkeypatch.setenv(signing.PASSWORD, "other")
    with pytest.raises(ReleaseError, match="expected a PEM key"):
        signing.load(tmp_path / "key")
    with pytest.raises(FileExistsError):
        signing.generate(tmp_path / "key")


def test_openssl_accepts_the_signatures(release_directory: Path, tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to verify signatures with")
    (tmp_path / "sig").write_bytes(base64.b64decode((release_directory / "out/SHA256SUMS.sig").read_text()))
    command = ["openssl", "dgst", "-sha256", "-verify", release_directory / "key.pub", "-signature", tmp_path / "sig"]
    subprocess.run([*command, release_directory / "out/SHA256SUMS"], check=True, capture_output=True)


def test_an_envelope_with_another_payload_is_rejected(release_directory: Path) -> None:
    key = signing.load(release_directory / "key")
    envelope = json.loads(signing.envelope(key, b"{}"))
    public = signing.load_public(release_directory / "key.pub")
    assert signing.opened(public, json.dumps(envelope).encode(), "x") == b"{}"
    for change in ({"payload": base64.b64encode(b"[]").decode()}, {"payloadType": "text/plain"}, {"signatures": []}):
        with pytest.raises(ReleaseError):
            signing.opened(public, json.dumps(envelope | change).encode(), "x")


# Registries.


def release_with_registry(release_directory: Path, tmp_path: Path, address: str, *, draft: bool = True) -> Path:
    """A copy of the release whose registry has another address."""
    out = tmp_path / "out"
    shutil.copytree(release_directory / "out", out)
    for name in ("release.json", "images.txt"):
        (out / name).write_text((out / name).read_text().replace(REGISTRY, address))
    facts = json.loads((out / "release.json").read_text())
    artefacts.write_json(out / "release.json", {**facts, "draft": draft})
    shutil.rmtree(out / "signatures")
    signatures.write(out, signing.load(release_directory / "key"))
    return out


def list_first_images(out: Path) -> artefacts.Images:
    """Removes all images but two from the list, so that a push takes less time."""
    listed = artefacts.Images(VERSION, images.load(out / "images.json").images[:2])
    artefacts.write_json(out / "images.json", artefacts.images_json(listed))
    return listed


@pytest.mark.parametrize("credentials", ["", "basic", "bearer"])
def test_a_release_is_pushed_and_verified(
    credentials: str, release_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_USER", "user")
    monkeypatch.setenv("REGISTRY_PASSWORD", "secret")
    with ociregistry.serving(credentials) as state:
        address = f"{state.address}/accelplane"
        out = release_with_registry(release_directory, tmp_path, address)
        listed = list_first_images(out)
        settings = Push(out=out)
        push(settings, lambda _: None)
        image = listed.images[0]
        assert state.digest(f"accelplane/{image.name}", VERSION) == image.digest
        registry = Registry(address)
        signature = json.loads(registry.manifest(image.name, signing.signature_tag(image.digest))[0])
        content = registry.blob(image.name, signature["layers"][0]["digest"])
        assert content == signing.payload(f"{address}/{image.name}", image.digest)
        chart = json.loads(registry.manifest("charts/accelplane", VERSION)[0])
        assert chart["layers"][0]["digest"] == oci.file_digest(
            release_directory / f"out/charts/accelplane-{VERSION}.tgz"
        )
        uploads = state.uploads
        push(settings, lambda _: None)
        assert state.uploads == uploads
    if credentials == "bearer":
        assert "repository:accelplane/accelplane:pull,push" in state.scopes


def test_tags_are_written_after_signatures(release_directory: Path, tmp_path: Path) -> None:
    with ociregistry.serving() as state:
        out = release_with_registry(release_directory, tmp_path, f"{state.address}/accelplane")
        list_first_images(out)
        push(Push(out=out), lambda _: None)
        for name in ("accelplane/accelplane", "accelplane/charts/accelplane", "accelplane/accelplane-catalog"):
            references = [reference for each, reference in state.manifests if each == name]
            assert references[-1] == VERSION
            assert references[-2].endswith(".sig")


def test_a_registry_with_another_release_of_the_version_is_unchanged(release_directory: Path, tmp_path: Path) -> None:
    with ociregistry.serving() as state:
        out = release_with_registry(release_directory, tmp_path, f"{state.address}/accelplane", draft=False)
        state.manifests["accelplane/onload-operator", VERSION] = (b"{}", oci.MANIFEST)
        with pytest.raises(ReleaseError, match=f"onload-operator:{VERSION}: found sha256:.*release a new version"):
            push(Push(out=out), lambda _: None)
        del state.manifests["accelplane/onload-operator", VERSION]
        (out / "signatures/index.json").write_text('{"manifests": []}')
        with pytest.raises(ReleaseError, match="found no signature of accelplane@sha256:"):
            push(Push(out=out), lambda _: None)
        assert (state.uploads, len(state.manifests)) == (0, 0)


def test_a_changed_registry_is_detected(release_directory: Path, tmp_path: Path) -> None:
    with ociregistry.serving() as state:
        address = f"{state.address}/accelplane"
        out = release_with_registry(release_directory, tmp_path, address)
        listed = images.load(out / "images.json")
        push(Push(out=out), lambda _: None)
        release = verify.Release(out=out, key=release_directory / "key.pub", registry=address)
        assert verify.registry_digests(release).startswith(f"{len(listed.images) + 13} artefacts")
        assert verify.registry_signatures(release) == f"{len(listed.images) + 13} signatures"
        state.manifests["accelplane/accelplane", VERSION] = state.manifests["accelplane/intel-gpu-plugin", VERSION]
        with pytest.raises(ReleaseError, match=f"accelplane:{VERSION}: found sha256"):
            verify.registry_digests(release)
        tag = signing.signature_tag(dict(listed.digests)["intel-gpu-plugin"])
        other = signing.signature_tag(dict(listed.digests)["accelplane"])
        state.manifests["accelplane/intel-gpu-plugin", tag] = state.manifests["accelplane/accelplane", other]
        with pytest.raises(ReleaseError, match=f"signature of {address}/intel-gpu-plugin: found"):
            verify.registry_signatures(release)
        layer = max(state.blobs, key=lambda each: len(state.blobs[each]))
        state.blobs[layer] += b"x"
        with pytest.raises(RegistryError, match="found content with another digest"):
            Registry(address).blob("x", layer)


@pytest.mark.parametrize("location", ["http://r.example/v2/x/blobs/uploads/1", "http://other.example/1"])
def test_a_registry_with_tls_cannot_redirect_to_plain_http(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    class Connection:
        """Answers 404 to HEAD, and to POST with the location of the upload."""

        def __init__(self, scheme: str) -> None:
            self._scheme = scheme
            self.status = 0

        def request(self, method: str, *_: object, **__: object) -> None:
            sent.append(f"{self._scheme} {method}")
            self.status = {"HEAD": 404, "POST": 202}.get(method, 201)

        def getresponse(self) -> "Connection":
            return self

        def getheaders(self) -> list[tuple[str, str]]:
            return [("Location", location)]

        def read(self, *_: int) -> bytes:
            return b""

        def close(self) -> None:
            pass

    monkeypatch.setattr("http.client.HTTPSConnection", lambda *_, **__: Connection("https"))
    monkeypatch.setattr("http.client.HTTPConnection", lambda *_, **__: Connection("http"))
    descriptor = oci.put(tmp_path, oci.encoded({"layers": [oci.put(tmp_path, b"x", "text/plain").json]}), oci.MANIFEST)
    with pytest.raises(RegistryError, match=r"r\.example: found the address http://\S+, expected https"):
        Registry("r.example").push("x", tmp_path, descriptor.json, [])
    assert sent == ["https HEAD", "https POST"]


def test_errors_of_registries_name_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGISTRY_USER", raising=False)
    with ociregistry.serving("basic") as state, pytest.raises(RegistryError, match="set REGISTRY_USER"):
        Registry(state.address).manifest("x", "1")
    with (
        ociregistry.serving() as state,
        pytest.raises(RegistryError, match=f"GET {state.address}/v2/x/manifests/1: .* 404"),
    ):
        Registry(state.address).manifest("x", "1")
    with pytest.raises(RegistryError, match=f"GET http://{state.address}/v2/x/manifests/1: "):
        Registry(state.address).manifest("x", "1")


# The offline archive.


@pytest.fixture
def unpacked(release_directory: Path, tmp_path: Path) -> Path:
    with tarfile.open(release_directory / f"out/{NAME}-offline.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / f"{NAME}-offline"


def install(directory: Path, *words: object, status: int = 0) -> str:
    command = [sys.executable, "-I", directory / "install.py", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == status, result.stderr
    return result.stderr if status else result.stdout


def test_the_installer_verifies_files_and_signature(unpacked: Path, release_directory: Path, tmp_path: Path) -> None:
    assert "are unchanged" in install(unpacked, "verify", "--key", release_directory / "key.pub")
    signing.generate(tmp_path / "other")
    assert "does not fit" in install(unpacked, "verify", "--key", tmp_path / "other.pub", status=1)
    (unpacked / "manifests/gpu_plugin.yaml").write_text("x")
    assert "gpu_plugin.yaml: found other content" in install(unpacked, "verify", status=1)
    (unpacked / "manifests/gpu_plugin.yaml").unlink()
    assert "gpu_plugin.yaml: not found" in install(unpacked, "verify", status=1)
    (unpacked / "new").symlink_to("/etc")
    assert "new: not in SHA256SUMS" in install(unpacked, "verify", status=1)
    (unpacked / "SHA256SUMS").write_text("x\n")
    assert "not in SHA256SUMS" in install(unpacked, "verify", status=1)


def test_the_installer_imports_images_under_tags_and_digests(
    unpacked: Path, release_directory: Path, tmp_path: Path
) -> None:
    program = tmp_path / "ctr"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\nexec cat >{tmp_path}/imported.tar\n')
    program.chmod(0o755)
    install(unpacked, "load", "--ctr", f"{program} --address /run/x.sock")
    assert (tmp_path / "words").read_text() == "--address /run/x.sock --namespace k8s.io images import -\n"
    with tarfile.open(tmp_path / "imported.tar") as tar:
        index = tar.extractfile("index.json")
        assert index
        entries = json.loads(index.read())["manifests"]
        blobs = {name.removeprefix("blobs/sha256/") for name in tar.getnames()}
    found = {each["annotations"]["io.containerd.image.name"]: each["digest"] for each in entries}
    digest = oci.root(release_directory / "images/accelplane").digest
    assert found[f"{REGISTRY}/accelplane:{VERSION}"] == found[f"{REGISTRY}/accelplane@{digest}"] == digest
    assert {digest.removeprefix("sha256:") for digest in found.values()} <= blobs
    program.write_text("#!/bin/sh\nexit 3\n")
    assert "failed with status 3" in install(unpacked, "load", "--ctr", program, status=1)
    assert "set --ctr" in install(unpacked, "load", "--ctr", tmp_path / "no", status=1)
    assert "found no program" in install(unpacked, "load", "--ctr", " ", status=1)
    program.write_text("#!/bin/sh\nexec cat >/dev/null\n")
    (unpacked / "images/index.json").unlink()
    assert "index.json" in install(unpacked, "load", "--ctr", program, status=1)


def chart(release_directory: Path) -> str:
    """The digest of the artefact of the chart accelplane."""
    return json.loads((release_directory / "out/release.json").read_text())["charts"]["accelplane"]


def test_the_installer_does_not_push_what_is_not_signed(unpacked: Path) -> None:
    (unpacked / "signatures/index.json").write_text('{"manifests": []}')
    with ociregistry.serving() as state:
        assert "signatures: found none of" in install(unpacked, "push", f"{state.address}/mirror", status=1)
    assert state.manifests == {}


def test_the_installer_pushes_to_a_registry_and_changes_manifests(
    unpacked: Path, release_directory: Path, tmp_path: Path
) -> None:
    with ociregistry.serving() as state:
        printed = install(unpacked, "push", f"{state.address}/mirror").splitlines()
    assert f"{state.address}/mirror/accelplane:{VERSION}" in printed
    assert len(printed) == len(names()) + 10
    assert state.digest("mirror/accelplane", VERSION) == oci.root(release_directory / "images/accelplane").digest
    assert ("mirror/charts/accelplane", VERSION) in state.manifests
    for name, digest in (
        ("accelplane", oci.root(release_directory / "images/accelplane").digest),
        ("charts/accelplane", chart(release_directory)),
    ):
        references = [reference for each, reference in state.manifests if each == f"mirror/{name}"]
        assert references[-2:] == [signing.signature_tag(digest), VERSION]
    assert set(install(unpacked, "list").split()) == set(TREES)
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\nexec cat >{tmp_path}/applied.yaml\n')
    program.chmod(0o755)
    install(unpacked, "apply", "--kubectl", program, "--registry", "mirror.example/x", "operator/default")
    assert (tmp_path / "words").read_text() == "apply --server-side --filename -\n"
    applied = (tmp_path / "applied.yaml").read_text()
    assert REGISTRY not in applied
    (deployment,) = [each for each in yaml.load_all(applied, yaml.CSafeLoader) if each["kind"] == "Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].startswith("mirror.example/x/intel-deviceplugin-operator:")
    assert "--image-vendor=mirror.example/x" in container["args"]
    assert install(unpacked, "show", "gpu_plugin") == (release_directory / "out/manifests/gpu_plugin.yaml").read_text()
    assert "expected one of: gpu_plugin, onload" in install(unpacked, "show", "x", status=1)
    for address in ("https://mirror.example/x", "mirror.example/x/"):
        assert "expected a host and path" in install(unpacked, "show", "--registry", address, "gpu_plugin", status=1)
        assert "expected a host and path" in install(unpacked, "push", address, status=1)


def test_all_trees_for_users_are_rendered() -> None:
    found = artefacts.trees(REPOSITORY / "deploy")
    assert {
        "accelplane_node",
        "fleet",
        "gpu_plugin",
        "sgx_plugin/base",
        "operator/default",
        "onload/config/default",
    } <= set(found)
    assert len(found) > 40
    assert not [each for each in found if each.startswith(("nfd", "components", "operator/base"))]


def test_archives_are_reproducible() -> None:
    files = {"b/c": b"1", "a": b"2"}
    first, second = (oci.compressed(oci.archive(dict(items))) for items in (files.items(), reversed(files.items())))
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert tar.getnames() == ["a", "b", "b/c"]


def test_bills_of_materials_follow_the_official_schemas(release_directory: Path, tmp_path: Path) -> None:
    python = REPOSITORY / ".venv/sbom/bin/python"
    if not python.exists():
        pytest.skip("no validators of bills of materials: make sbom-tools")
    command = [python, REPOSITORY / "tests/sbomschemas.py"]
    result = subprocess.run([*command, release_directory / "out/sbom"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{2 * len(names()) + 2} documents, 0 problems\n"), result.stderr
    for name, old, new in (("cdx", '"type": "container"', '"type": "box"'), ("spdx", "CC0-1.0", "MIT")):
        text = (release_directory / f"out/sbom/accelplane.{name}.json").read_text()
        (tmp_path / f"x.{name}.json").write_text(text.replace(old, new))
        wrong = subprocess.run([*command, tmp_path / f"x.{name}.json"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 1, wrong.stdout
