"""The installer of the offline archive of a release."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import memorydirectory
import ociregistry
import pytest
import yaml
from releasebuilds import NAME, REGISTRY, TREES, build_release, chart
from releases import VERSION, names

from release import oci, signing

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module")
def release_directory() -> Path:
    """A directory with images, a key, and the release `out`. It is the same one in all processes."""
    return memorydirectory.build_once("release", build_release)


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
    assert len(printed) == len(names()) + 11
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
