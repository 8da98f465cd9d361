"""Releases pushed to registries."""

import json
import shutil
from pathlib import Path

import memorydirectory
import ociregistry
import pytest
from releasebuilds import REGISTRY, build_release
from releases import VERSION

from release import artefacts, images, oci, signatures, signing, verify
from release.errors import ReleaseError
from release.push import Push, push
from release.registry import Registry, RegistryError

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module")
def release_directory() -> Path:
    """A directory with images, a key, and the release `out`. It is the same one in all processes."""
    return memorydirectory.build_once("release", build_release)


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
        release = verify.Release(out=out, key=release_directory / "key.pub", version=VERSION, registry=address)
        assert verify.registry_digests(release).startswith(f"{len(listed.images) + 14} artefacts")
        assert verify.registry_signatures(release) == f"{len(listed.images) + 14} signatures"
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
