"""The recipe of the images: the lock file of Debian packages, downloads, ELF files, layers and layouts."""

import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from buildroot import build_packages
from containerfile import Image, read_images
from contents import LEVELZERO_ARCHITECTURES, wanted_packages
from debian import LOCK, PackageGoneError, RecipeError, fetch, newest, read_lock, select, write_lock
from elf import check_libraries, needed
from hypothesis import given
from hypothesis import strategies as st
from layout import Layer, LayoutWriter, write_tar

REPOSITORY = Path(__file__).parents[2]
needs_apt = pytest.mark.skipif(not Path("/usr/lib/apt/apt-helper").exists(), reason="needs apt of Debian")


class Mirror:
    """A web server with the files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

            def log_message(self, *arguments: object) -> None:
                """Prints nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def lock(self, content: bytes, **changed: str) -> Path:
        """A lock file with one package, which the mirror has."""
        (self.directory / "x.deb").write_bytes(content)
        digest = changed.get("sha256", hashlib.sha256(content).hexdigest())
        file = self.directory / "packages.lock"
        path = changed.get("path", "x.deb")
        file.write_text(f"# comment\nbookworm amd64 x 1.0 {len(content)} {digest} debian {path}\n")
        return file


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    (tmp_path / "mirror").mkdir()
    mirror = Mirror(tmp_path / "mirror")
    thread = threading.Thread(target=mirror.server.serve_forever)
    thread.start()
    monkeypatch.setenv("DEBIAN_MIRROR", mirror.address)
    monkeypatch.setenv("DEBIAN_SECURITY_MIRROR", f"{mirror.address}/security")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield mirror
    mirror.server.shutdown()
    thread.join()
    mirror.server.server_close()


def packages(lock: Path) -> list[object]:
    return select(read_lock(lock), "bookworm", "amd64", ["x"])  # type: ignore[return-value]


@needs_apt
def test_a_package_is_downloaded_once(mirror: Mirror, tmp_path: Path) -> None:
    lock = mirror.lock(b"content")
    file = fetch(packages(lock), tmp_path / "cache")["x"]
    (mirror.directory / "x.deb").unlink()
    assert fetch(packages(lock), tmp_path / "cache") == {"x": file}
    assert file.read_bytes() == b"content"


@needs_apt
def test_a_package_missing_on_the_mirror_is_reported_with_the_command_that_updates_the_lock(
    mirror: Mirror, tmp_path: Path
) -> None:
    lock = mirror.lock(b"content", path="gone.deb")
    with pytest.raises(PackageGoneError, match=r"x 1\.0 .*: the mirror no longer has it; run make images-lock"):
        fetch(packages(lock), tmp_path / "cache")


@needs_apt
def test_a_package_with_another_hash_is_rejected(mirror: Mirror, tmp_path: Path) -> None:
    lock = mirror.lock(b"content", sha256="0" * 64)
    with pytest.raises(RecipeError, match=r"x 1\.0") as caught:
        fetch(packages(lock), tmp_path / "cache")
    assert not isinstance(caught.value, PackageGoneError)
    assert not list((tmp_path / "cache/packages").iterdir())


@needs_apt
def test_scripts_report_a_missing_package_by_their_exit_status(mirror: Mirror, tmp_path: Path) -> None:
    lock = mirror.lock(b"content", path="gone.deb")
    command = [sys.executable, REPOSITORY / "deploy/images/debian.py", "fetch", "bookworm/amd64/x", "--lock", lock]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "")
    assert "make images-lock" in result.stderr


def test_every_package_of_the_recipe_is_locked() -> None:
    lock = read_lock()
    for (release, architecture), names in wanted_packages("amd64", "arm64").items():
        select(lock, release, architecture, names)
    assert {package.release for package in lock.values() if package.architecture == "arm64"} == {"bookworm"}
    assert LEVELZERO_ARCHITECTURES == ("amd64",)


def test_images_of_both_architectures_have_the_same_versions() -> None:
    lock = read_lock()
    versions = {
        (name, package.version.partition("+b")[0])
        for (release, architecture, name), package in lock.items()
        if release == "bookworm" and architecture == "amd64" and name not in build_packages("amd64")
    }
    for name, version in versions:
        assert lock["bookworm", "arm64", name].version.partition("+b")[0] == version


def test_the_lock_file_is_written_as_it_is_read(tmp_path: Path) -> None:
    write_lock(read_lock().values(), tmp_path / "packages.lock")
    assert (tmp_path / "packages.lock").read_text() == LOCK.read_text()


@given(st.text(max_size=200))
def test_any_lock_file_is_read_or_rejected_with_its_line(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", errors="replace", suffix=".lock") as file:
        file.write(text)
        file.flush()
        problem = ""
        try:
            read_lock(Path(file.name))
        except RecipeError as error:
            problem = str(error)
    assert problem.startswith(f"{file.name}:") or not problem


def test_a_package_that_is_not_locked_is_reported_with_the_command() -> None:
    with pytest.raises(RecipeError, match="found no bookworm amd64 nothing; run make images-lock"):
        select(read_lock(), "bookworm", "amd64", ["nothing"])


@needs_apt
def test_an_update_needs_signed_lists(mirror: Mirror) -> None:
    with pytest.raises(RecipeError, match="update"):
        newest({("bookworm", "amd64"): ["libc6"]})


def program(machine: int, libraries: list[str], loader: str = "/lib64/ld.so") -> bytes:
    """An ELF file that names a loader and libraries; addresses are offsets plus 0x1000."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in libraries)
    dynamic = b"".join(
        struct.pack("<qQ", 1, 1 + sum(len(other) + 1 for other in libraries[:number]))
        for number in range(len(libraries))
    )
    start = 64 + 3 * 56
    text = loader.encode() + b"\0"
    dynamic += struct.pack("<qQqQ", 5, 0x1000 + start + len(text), 0, 0)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    at = start + len(text) + len(strings)
    end = at + len(dynamic)
    segments = (
        struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0, end, end, 1),
        struct.pack("<IIQQQQQQ", 3, 4, start, 0x1000 + start, 0, len(text), len(text), 1),
        struct.pack("<IIQQQQQQ", 2, 4, at, 0x1000 + at, 0, len(dynamic), len(dynamic), 1),
    )
    return header + b"".join(segments) + text + strings + dynamic


def test_the_loader_and_libraries_of_a_program_are_read() -> None:
    assert needed(program(62, ["libc.so.6", "libm.so.6"])) == ["/lib64/ld.so", "libc.so.6", "libm.so.6"]


@given(length=st.integers(0, 400), junk=st.binary(max_size=64))
def test_a_truncated_program_is_an_error(length: int, junk: bytes) -> None:
    data = program(183, ["libc.so.6"])[:length] + junk
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "program").write_bytes(b"\x7fELF\x02" + data[5:])
        for name in ("ld.so", "libc.so.6"):
            (Path(root) / name).touch()
        with suppress(RecipeError):
            check_libraries(Path(root), "arm64")


def test_the_libraries_of_this_interpreter_are_found() -> None:
    assert any(name.startswith("libc.so") for name in needed(Path(sys.executable).resolve().read_bytes()))


@pytest.mark.parametrize(
    ("present", "machine", "problem"),
    [
        (["ld.so", "libc.so.6"], 183, None),
        (["ld.so"], 183, "needs libc.so.6, which is missing"),
        (["libc.so.6"], 183, "needs /lib64/ld.so, which is missing"),
        (["ld.so", "libc.so.6"], 62, "found ELF machine 62, expected 183"),
    ],
)
def test_a_root_for_another_machine_is_verified(
    tmp_path: Path, present: list[str], machine: int, problem: str | None
) -> None:
    (tmp_path / "program").write_bytes(program(machine, ["libc.so.6"]))
    for name in present:
        (tmp_path / name).touch()
    if problem is None:
        check_libraries(tmp_path, "arm64")
        return
    with pytest.raises(RecipeError, match=problem):
        check_libraries(tmp_path, "arm64")


def a_tree(root: Path, umask: int, names: list[str]) -> Path:
    before = os.umask(umask)
    try:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        (root / "bin").mkdir()
        (root / "bin/tool").write_text("#!/bin/sh\n")
        (root / "bin/tool").chmod(0o700)
        (root / "bin/same").hardlink_to(root / "bin/tool")
        (root / "bin/link").symlink_to("tool")
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
    finally:
        os.umask(before)
    return root


def test_equal_trees_have_equal_layers_whatever_their_umask_and_order(tmp_path: Path) -> None:
    names = ["b/2", "a", "é", "b.c", "b/1"]
    one = a_tree(tmp_path / "one", 0o077, names)
    other = a_tree(tmp_path / "elsewhere/other", 0o002, names[::-1])
    os.utime(other / "a", (1, 1))
    write_tar(one, tmp_path / "one.tar", 1000)
    write_tar(other, tmp_path / "other.tar", 1000)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "other.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as tar:
        entries = {entry.name: entry for entry in tar}
    assert {(entry.uid, entry.gid, entry.uname, entry.mtime) for entry in entries.values()} == {(0, 0, "", 1000)}
    assert {name: oct(entry.mode) for name, entry in entries.items() if not entry.issym()} == {
        **dict.fromkeys(("a", "é", "b.c", "b/1", "b/2"), "0o644"),
        **dict.fromkeys(("b", "bin", "bin/tool", "bin/same"), "0o755"),
        "tmp": "0o1777",
    }
    assert entries["bin/tool"].islnk()
    assert entries["bin/tool"].linkname == "bin/same"


def test_layouts_refer_to_blobs_by_digest_and_share_layers(tmp_path: Path) -> None:
    blob = tmp_path / "layer.tar.gz"
    blob.write_bytes(b"layer")
    layer = Layer(blob, f"sha256:{hashlib.sha256(b'layer').hexdigest()}", 5, f"sha256:{'1' * 64}")
    writer = LayoutWriter(tmp_path, "docker.io/ours", "1.2.3", 0)
    labels = {"description": "What it does", "vendor": "Ours", "org.opencontainers.image.title": "one"}
    images = [Image(name, ("/x",), labels, ("base",), user="1001") for name in ("one", "two")]
    written = [writer.write(image, {"amd64": [layer], "arm64": [layer]}) for image in images]
    assert written[0].sizes == {"linux/amd64": 5, "linux/arm64": 5}
    for image in ("one", "two"):
        for file in (tmp_path / image / "blobs/sha256").iterdir():
            assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    top = json.loads((tmp_path / "one/index.json").read_text())
    assert [entry["digest"] for entry in top["manifests"]] == [written[0].digest]
    assert top["manifests"][0]["annotations"]["io.containerd.image.name"] == "docker.io/ours/one:1.2.3"
    index = read_blob(tmp_path / "one", written[0].digest)
    assert [entry["platform"] for entry in index["manifests"]] == [
        {"architecture": "amd64", "os": "linux"},
        {"architecture": "arm64", "os": "linux", "variant": "v8"},
    ]
    manifest = read_blob(tmp_path / "one", index["manifests"][1]["digest"])
    config = read_blob(tmp_path / "one", manifest["config"]["digest"])
    assert config["config"]["User"] == "1001"
    assert config["rootfs"]["diff_ids"] == [f"sha256:{'1' * 64}"]
    assert manifest["annotations"]["org.opencontainers.image.created"] == "1970-01-01T00:00:00Z"
    assert manifest["annotations"]["org.opencontainers.image.description"] == "What it does"
    shared = [tmp_path / name / "blobs" / layer.digest.replace(":", "/") for name in ("one", "two")]
    assert shared[0].samefile(shared[1])
    assert not shared[0].samefile(blob)


def test_a_layout_is_replaced_atomically(tmp_path: Path) -> None:
    blob = tmp_path / "layer.tar.gz"
    blob.write_bytes(b"layer")
    layer = Layer(blob, f"sha256:{hashlib.sha256(b'layer').hexdigest()}", 5, f"sha256:{'1' * 64}")
    image = Image("one", ("/x",), {"description": "a", "vendor": "b"}, ("base",))
    written = LayoutWriter(tmp_path, "docker.io/ours", "1", 0).write(image, {"amd64": [layer]})
    (tmp_path / "one/stale").touch()
    blob.unlink()
    with pytest.raises(FileNotFoundError):
        LayoutWriter(tmp_path, "docker.io/ours", "2", 0).write(image, {"amd64": [layer]})
    assert json.loads((tmp_path / "one/index.json").read_text())["manifests"][0]["digest"] == written.digest
    blob.write_bytes(b"layer")
    LayoutWriter(tmp_path, "docker.io/ours", "2", 0).write(image, {"amd64": [layer]})
    assert not (tmp_path / "one/stale").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "layer.tar.gz"}


@pytest.mark.parametrize(
    "line",
    [
        f"bookworm amd64 x 1.0 1 {'0' * 64} other x.deb",
        f"bookworm s390x x 1.0 1 {'0' * 64} debian x.deb",
        f"bookworm amd64 ../x 1.0 1 {'0' * 64} debian x.deb",
        f"bookworm amd64 x 1.0 1 {'0' * 64} debian pool/../../x.deb",
        f"bookworm amd64 x 1.0 ² {'0' * 64} debian x.deb",
        f"bookworm amd64 x 1.0 1 {'0' * 63} debian x.deb",
    ],
)
def test_invalid_lines_of_a_lock_file_are_errors(line: str, tmp_path: Path) -> None:
    (tmp_path / "packages.lock").write_text(f"# comment\n{line}\n")
    with pytest.raises(RecipeError, match=r"packages\.lock:2: found .*, expected eight fields; run make images-lock"):
        read_lock(tmp_path / "packages.lock")


def read_blob(layout: Path, digest: str) -> dict[str, object]:
    return json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())  # type: ignore[no-any-return]


def test_every_historic_name_has_an_image() -> None:
    aliases = {alias for image in read_images("1.2.3").values() for alias in image.aliases}
    names = (
        "gpu-plugin", "fpga-plugin", "qat-plugin", "sgx-plugin", "dsa-plugin", "iaa-plugin", "dlb-plugin", "npu-plugin",
        "deviceplugin-operator", "sgx-admissionwebhook", "fpga-admissionwebhook", "gpu-levelzero", "xpumanager-sidecar",
        "gpu-fakedev", "fpga-initcontainer", "gpu-initcontainer", "sgx-initcontainer", "dlb-initcontainer",
        "qat-initcontainer", "idxd-config-initcontainer", "qat-plugin-kerneldrv",
    )  # fmt: skip
    assert aliases == {
        *(f"intel/intel-{name}" for name in names),
        "onload/onload-operator",
        "onload/onload-device-plugin",
        "squat/generic-device-plugin",
    }


def test_unknown_images_and_platforms_are_errors_before_anything_is_built(tmp_path: Path) -> None:
    script = REPOSITORY / "deploy/images/images.py"
    for arguments, problem in (
        (("--images", "intel-gpu-plugn"), "images: found intel-gpu-plugn, expected some of accelplane"),
        (("--platforms", "linux/s390x"), "--platforms: found linux/s390x, expected linux/amd64 or linux/arm64"),
    ):
        command = [sys.executable, script, tmp_path / "out", "--cache", tmp_path / "cache", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode
        assert problem in result.stderr
    assert not list(tmp_path.glob("out/*"))
