"""Detection of changed releases, and their keys and signatures."""

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import memorydirectory
import pytest
from releasebuilds import NAME, build_release, replace
from releases import VERSION

from release import artefacts, signatures, signing, verify
from release.errors import ReleaseError

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module")
def release_directory() -> Path:
    """A directory with images, a key, and the release `out`. It is the same one in all processes."""
    return memorydirectory.build_once("release", build_release)


@pytest.fixture
def copy(release_directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(release_directory / "out", tmp_path / "out")
    return tmp_path / "out"


def failures(out: Path, key: Path, **fields: object) -> dict[str, str]:
    options = {"version": VERSION, "draft": True} | fields
    found = verify.verify(verify.Release(out=out, key=key, **options))  # pyright: ignore
    return {each.name: each.problem for each in found if each.problem}


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


def test_another_version_and_a_draft_are_rejected(copy: Path, release_directory: Path) -> None:
    key = release_directory / "key.pub"
    found = f"release.json: found version {VERSION}, expected 9.9.9"
    assert failures(copy, key, version="9.9.9") == {"version": found}
    found = "release.json: found a draft, expected a release of a commit; use --draft to accept it"
    assert failures(copy, key, draft=False) == {"version": found}


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


SIGNED_CHANGES: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "image": (_blob, {"images"}),
    "list": (replace("images.txt", "intel-gpu-plugin", "intel-gpu-other"), {"images"}),
    "unused blob": (lambda out: (out / "images/blobs/sha256/x").write_text(""), {"images"}),
    "manifest": (replace("manifests/gpu_plugin.yaml", "@sha256:", "@sha256:0"), {"manifests"}),
    "manifest by tag": (replace("manifests/gpu_plugin.yaml", f":{VERSION}@sha256", ":latest@sha256"), {"manifests"}),
    "chart": (lambda out: shutil.copy(out / f"charts/intel-device-plugins-sgx-{VERSION}.tgz",
                                      out / f"charts/intel-device-plugins-gpu-{VERSION}.tgz"),
              {"charts", "provenance"}),
    "bundle": (replace("olm/onload-operator/manifests/onload-operator.clusterserviceversion.yaml",
                        "onload-device-plugin@sha256:", "onload-device-plugin@sha256:0"), {"bundles"}),
    "catalog": (replace("olm/catalog/onload-operator/catalog.yaml", "onload-operator-bundle@sha256:",
                         "onload-operator-bundle@sha256:0"), {"bundles"}),
    "bill of materials": (replace("sbom/accelplane.spdx.json", "msgspec@0.20.0", "msgspec@0.20.1"),
                          {"bills of materials"}),
    "digest of a bill": (replace("sbom/accelplane.cdx.json", '"content": "', '"content": "0'),
                         {"bills of materials"}),
    "provenance": (replace("provenance.json", "gitCommit", "gitcommit"), {"provenance"}),
    "commit": (replace("release.json", '"commit": "', '"commit": "0'), {"provenance", "offline archive"}),
    "signature": (replace("signatures/index.json", "onload-operator-bundle:", "x:"), {"artefact signatures"}),
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
