"""Releases with small images: content, and detection of every change."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import memorydirectory
import pytest
import yaml
from charts import KUBE_VERSION, run_helm
from manifests import REPOSITORY, flag_values, kubectl
from releasebuilds import NAME, REGISTRY, build_release, layer, plan, replace
from releases import METADATA, STATUS, VERSION, names, write_images

from accelplane.cli.operator import FLAGS, options
from accelplane.manifests.spans import EditError
from accelplane.operator.images import pin_digest
from release import artefacts, build, git, images, oci, sbom, verify
from release.errors import ReleaseError
from release.kustomize import load_yaml
from release.olm.products import PLUGIN_IMAGES

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module")
def release_directory() -> Path:
    """A directory with images, a key, and the release `out`. It is the same one in all processes."""
    return memorydirectory.build_once("release", build_release)


@pytest.fixture
def copy(release_directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(release_directory / "out", tmp_path / "out")
    return tmp_path / "out"


def test_a_release_passes_all_checks(release_directory: Path) -> None:
    found = list(
        verify.verify(
            verify.Release(
                out=release_directory / "out", key=release_directory / "key.pub", version=VERSION, draft=True
            )
        )
    )
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
        assert pin_digest(default, policy) == expected[default]
        # The tag in a mirror, or another tag, is that of another image.
        for other in (f"mirror.example/{name}:{VERSION}", f"{REGISTRY}/{name}:1.0.1", f"{REGISTRY}/{name}:devel"):
            assert pin_digest(other, policy) == other


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
    release = verify.Release(out=copy, key=release_directory / "key.pub", version=VERSION)
    listed = (copy / "images.json").read_text()
    digest = images.load(copy / "images.json").images[0].digest
    (copy / "images.json").write_text(listed.replace(digest, OTHER))
    with pytest.raises(ReleaseError, match=r"found other digests than in images\.json, or none"):
        verify.helm_charts(release)
    (copy / "images.json").write_text(listed)
    replace("release.json", REGISTRY, "other.example/a")(copy)
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


OTHER = f"sha256:{'0' * 64}"


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
        settings = {"version": VERSION, "out": tmp_path / "out", "registry": "registry.example", **fields}
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
