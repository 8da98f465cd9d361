"""Releases: wrong input is an error with one line, and failures leave no files."""

import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from manifests import REPOSITORY
from releases import METADATA, VERSION

from release import artefacts, build, charts, commands, git, oci, sbom, signing, verify
from release.__main__ import release
from release.errors import ReleaseError
from release.registry import ADDRESS, Registry, RegistryError

# The command line.


def test_a_release_needs_a_registry() -> None:
    result = CliRunner().invoke(release, ["build", "--version", VERSION, "--out", "x", "--key", "x"])
    assert result.exit_code == 2
    assert "Missing option '--registry'" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["key", ""],
        ["build", "--version", VERSION, "--out", "", "--key", "x"],
        ["build", "--version", VERSION, "--out", "x", "--key", ""],
        ["push", ""],
        ["verify", "", "--key", "x", "--version", "1"],
    ],
)
def test_variables_that_are_not_set_are_errors(words: list[str]) -> None:
    result = CliRunner().invoke(release, words)
    assert result.exit_code == 2
    assert "found an empty path; set " in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "--registry", "https://a.example"], "registry: found 'https://a.example', expected a host and path"),
        (["build", "--registry", "tools/x"], "registry: found 'tools/x', expected a host and path"),
        (["build", "--registry", "a.example/x", "--key", "/x/key"], "No such file or directory: '/x/key'"),
        (["build", "--registry", "a.example/x", "--out", "/dev/null/x"], "File exists: '/dev/null'"),
    ],
)
def test_errors_are_one_message(words: list[str], message: str, tmp_path: Path) -> None:
    signing.generate(tmp_path / "key")
    arguments = ["--version", VERSION, "--draft", "--key", tmp_path / "key", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "release", words[0], *arguments, *words[1:]]
    environment = {**os.environ, "PATH": f"{_kustomize(tmp_path)}:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def _kustomize(directory: Path) -> Path:
    """A directory with a program that is not started."""
    (directory / "bin").mkdir()
    (directory / "bin/kubectl").symlink_to("/bin/false")
    return directory / "bin"


@pytest.mark.parametrize("text", ["1e9", "-1", "²", "99999999999", "1.5"])
def test_invalid_times_are_errors(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(ReleaseError, match=r"SOURCE_DATE_EPOCH: found .*, expected seconds since 1970"):
        commands.created(REPOSITORY)


# Sources.


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "src").mkdir(parents=True)
    (root / ".gitignore").write_text("*.log\n__pycache__/\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    return root


def test_ignored_files_that_would_be_released_are_changes(clone: Path) -> None:
    (clone / "src/__pycache__").mkdir()
    (clone / "src/__pycache__/a.pyc").touch()
    (clone / "other.log").touch()
    assert git.changes(clone, "src", "deploy") == []
    (clone / "src/a.log").touch()
    assert git.changes(clone, "src", "deploy") == ["!! src/a.log"]


def test_a_missing_git_is_an_error(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ReleaseError, match="git: not found, expected in PATH"):
        git.commit(clone)


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    chart = tmp_path / "charts/one"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("name: one\nversion: 1.0.0\nappVersion: 1.0.0\n")
    return chart


@pytest.mark.parametrize("target", ["/etc", "../../../secret", "..", "."])
def test_links_out_of_the_charts_and_loops_are_errors(chart: Path, target: str) -> None:
    assert charts.package(chart, "1.0.0")
    (chart.parents[1] / "secret").write_text("x")
    (chart / "templates/link").symlink_to(target)
    with pytest.raises(ReleaseError, match=r"found a link to .*, expected one to another chart"):
        charts.package(chart, "1.0.0")


# Bills of materials.


def test_a_package_with_and_without_license_is_listed_once(tmp_path: Path) -> None:
    names = (f"usr/lib/{place}/msgspec-0.20.0.dist-info/METADATA" for place in ("a", "b"))
    texts = (METADATA, METADATA.replace("License-Expression: BSD-3-Clause\n", ""))
    archive = oci.archive({name: text.encode() for name, text in zip(names, texts, strict=True)})
    image = {"schemaVersion": 2, "layers": [oci.put(tmp_path, oci.compressed(archive), oci.LAYER).json]}
    (found,) = sbom.of_image(tmp_path, oci.put(tmp_path, oci.encoded(image), oci.MANIFEST), {})
    assert found.license == "BSD-3-Clause"


def test_the_dependencies_are_those_of_the_python_of_images() -> None:
    found = build.dependencies(REPOSITORY)
    assert "msgspec" in found
    # Only for Windows, or for older versions of Python.
    assert not found & {"colorama", "tomli", "exceptiongroup", "importlib-metadata"}


# Keys.


def test_keys_of_other_curves_are_errors(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "key.pub").write_bytes(signing.public_text(key))
    with pytest.raises(ReleaseError, match="found another kind of key, expected P-256"):
        signing.load_public(tmp_path / "key.pub")


def test_a_signature_can_end_with_a_line_end(tmp_path: Path) -> None:
    signing.generate(tmp_path / "key")
    signature = signing.sign(signing.load(tmp_path / "key"), b"x")
    signing.verify(signing.load_public(tmp_path / "key.pub"), b"x", f"{signature}\n", "x")


# Verification.


@pytest.fixture
def signed(tmp_path: Path) -> verify.Release:
    """A directory with a file, its checksum and the signature, as a release has them."""
    signing.generate(tmp_path / "key")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("x")
    sums = f"{oci.digest_of(b'x').removeprefix('sha256:')}  file\n"
    (tmp_path / "out/SHA256SUMS").write_text(sums)
    signature = signing.sign(signing.load(tmp_path / "key"), sums.encode())
    (tmp_path / "out/SHA256SUMS.sig").write_text(signature)
    return verify.Release(out=tmp_path / "out", key=tmp_path / "key.pub", version=VERSION)


@pytest.mark.parametrize("target", ["/etc", "nowhere", "file"])
def test_links_in_a_release_are_detected(signed: verify.Release, target: str) -> None:
    assert verify.checksums(signed) == "1 files"
    (signed.out / "link").symlink_to(target)
    with pytest.raises(ReleaseError, match="link: found in the directory or in SHA256SUMS only"):
        verify.checksums(signed)


def test_a_file_replaced_by_a_link_is_detected(signed: verify.Release) -> None:
    (signed.out / "file").rename(signed.out.parent / "file")
    (signed.out / "file").symlink_to("../file")
    with pytest.raises(ReleaseError, match="file: found a link or a special file"):
        verify.checksums(signed)


def test_no_other_check_reads_files_with_wrong_checksums(signed: verify.Release) -> None:
    (signed.out / "file").write_text("y")
    assert [each.name for each in verify.verify(signed)] == ["signature", "checksums"]


def test_messages_report_an_unexpected_file_format(signed: verify.Release) -> None:
    (signed.out / "file").rename(signed.out / "release.json")
    (signed.out / "release.json").write_text("[]")
    sums = artefacts.checksums(signed.out).splitlines(keepends=True)
    text = "".join(line for line in sums if "SHA256SUMS" not in line)
    (signed.out / "SHA256SUMS").write_text(text)
    key = signing.load(signed.key.with_name("key"))
    (signed.out / "SHA256SUMS.sig").write_text(signing.sign(key, text.encode()))
    found = {each.name: each.problem for each in verify.verify(signed)}
    assert found["python packages"].startswith("found a file with another form than that of a release: TypeError")
    assert found["images"].endswith("run make images to write it")


@pytest.mark.parametrize("name", ["../a", "x-offline/a", "accelplane-1.0.0-offline/../a", "accelplane-1.0.0-offline/b"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.REGTYPE])
def test_offline_archives_have_only_regular_files_in_their_directory(name: str, kind: bytes, tmp_path: Path) -> None:
    (tmp_path / "release.json").write_text('{"version": "1.0.0"}')
    with tarfile.open(tmp_path / "accelplane-1.0.0-offline.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("accelplane-1.0.0-offline/b"))
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc"
        tar.addfile(member)
    with pytest.raises(
        ReleaseError, match=r"found the member .*, expected files below accelplane-1\.0\.0-offline, once"
    ):
        verify.offline_archive(verify.Release(out=tmp_path, key=tmp_path / "key.pub", version=VERSION))


def test_an_offline_archive_without_signed_checksums_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "release.json").write_text('{"version": "1.0.0"}')
    with tarfile.open(tmp_path / "accelplane-1.0.0-offline.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("accelplane-1.0.0-offline/SHA256SUMS"))
    with pytest.raises(ReleaseError, match=r"found \['SHA256SUMS'\], expected SHA256SUMS and its signature"):
        verify.offline_archive(verify.Release(out=tmp_path, key=tmp_path / "key.pub", version=VERSION))


# Registries.


@pytest.mark.parametrize(
    "address", ["docker.io/a", "localhost/a", "localhost:5000", "r.example:5000/a/b-c", "10.0.0.1"]
)
def test_addresses_of_registries(address: str) -> None:
    assert Registry(address).path == address.partition("/")[2]


@pytest.mark.parametrize(
    "address",
    [
        *("", "a", "tools/a", "https://r.example/a", "r.example/", "r.example/A", "r.example:x/a", "u@r.example/a"),
        *("r.example//a", "r.example/a:1", "r.example/../a", "r.example/a b", "r.example/a?x", "-r.example/a"),
    ],
)
def test_addresses_that_are_no_registries_are_errors(address: str) -> None:
    with pytest.raises(RegistryError, match="expected a host and path without scheme"):
        Registry(address)


@given(st.text("a./:-_A ", max_size=30))
def test_an_accepted_address_has_a_host_and_a_path(address: str) -> None:
    if ADDRESS.fullmatch(address):
        registry = Registry(address)
        assert registry.host
        assert "//" not in registry.repository("x")


@contextmanager
def answering(status: int, content: bytes, **headers: str) -> Iterator[str]:
    """A server that gives one answer to all requests."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}/x"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_blob_that_is_longer_than_its_size_is_an_error() -> None:
    with answering(200, b"12345") as address:
        assert Registry(address).blob("a", oci.digest_of(b"12345"), 5) == b"12345"
        with pytest.raises(RegistryError, match="found more than 4 bytes in the answer"):
            Registry(address).blob("a", oci.digest_of(b"12345"), 4)


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (307, {}, "found status 307"),
        (401, {"WWW_Authenticate": 'Bearer realm="http://127.0.0.1:1/"'}, "127.0.0.1:1"),
        (401, {"WWW_Authenticate": "x" * 1000}, "credentials are required"),
        (500, {}, "found status 500: no"),
    ],
)
def test_responses_without_the_blob_are_errors(status: int, headers: dict[str, str], message: str) -> None:
    with answering(status, b"no", **headers) as address, pytest.raises(RegistryError, match=message):
        Registry(address).blob("a", oci.digest_of(b"x"), 1)


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"token": 1}', b'{"token": "a\\nb"}', b"x"])
def test_tokens_that_are_no_tokens_are_errors(answer: bytes) -> None:
    with answering(200, answer) as tokens:
        challenge = f'Bearer realm="http://{tokens}",service="s"'
        with answering(401, b"", WWW_Authenticate=challenge) as address, pytest.raises(RegistryError):
            Registry(address).manifest("a", "1")
