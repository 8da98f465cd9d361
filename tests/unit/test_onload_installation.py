"""The script of the init container, run in a directory that stands for a node."""

import os
import subprocess
from pathlib import Path

import pytest

from accelplane.onload.installation import SCRIPT, installation_name

pytestmark = pytest.mark.memory


class Host:
    """A node, the image of the userland, and the volume of the worker, below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = root / "host"
        self.image = root / "image"
        self.proc = root / "proc"
        self.host.mkdir()
        (self.proc / "1").mkdir(parents=True)
        self.mounts("1")
        self.release("1")

    def release(self, content: str) -> None:
        """Makes the image that of another release."""
        for path in ("usr/lib64/libonload.so", "usr/bin/onload", "sbin/onload_cp_server"):
            file = self.image / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content * 3 if content == "longer" else content)

    def mounts(self, pid: str, *paths: str) -> None:
        """A process has these files of the node mounted."""
        (self.proc / pid).mkdir(exist_ok=True)
        lines = [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            *(f"2 1 8:1 /opt/onload/{path} /x ro - ext4 a rw" for path in paths),
        ]
        (self.proc / pid / "mountinfo").write_text("\n".join(lines) + "\n")

    def install(self, name: str) -> subprocess.CompletedProcess[str]:
        script = (
            SCRIPT.replace("/host/onload", str(self.host))
            .replace("/opt/onload", str(self.image))
            .replace("/mnt/onload", str(self.root / "worker"))
            .replace("/proc/", f"{self.proc}/")
        )
        return subprocess.run(
            ["/bin/sh", "-c", script, "init", name], capture_output=True, text=True, check=False, cwd=self.root
        )

    def versions(self) -> set[str]:
        return {each.name for each in (self.host / "versions").iterdir() if not each.name.startswith(".")}

    def read(self, path: str) -> str:
        return (self.host / path).read_text()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def installed(host: Host, name: str) -> None:
    result = host.install(name)
    assert result.returncode == 0, result.stderr


def test_files_are_in_a_directory_of_the_version_behind_links(host: Host) -> None:
    installed(host, "8.1-a")
    assert os.readlink(host.host / "current") == "versions/8.1-a"
    assert os.readlink(host.host / "usr") == "current/usr"
    assert host.read("usr/lib64/libonload.so") == host.read("versions/8.1-a/usr/lib64/libonload.so") == "1"
    assert (host.root / "worker/sbin/onload_cp_server").read_text() == "1"


def test_a_second_run_changes_nothing(host: Host) -> None:
    installed(host, "8.1-a")
    inode = (host.host / "versions/8.1-a/usr/lib64/libonload.so").stat().st_ino
    installed(host, "8.1-a")
    assert (host.host / "versions/8.1-a/usr/lib64/libonload.so").stat().st_ino == inode
    assert host.versions() == {"8.1-a"}


def test_files_of_running_applications_and_of_the_former_version_stay(host: Host) -> None:
    for number, name in enumerate(("one", "two", "three", "four")):
        host.release(str(number))
        if name == "three":
            host.mounts("77", "versions/one/usr/lib64/libonload.so")
        installed(host, name)
    assert host.versions() == {"one", "three", "four"}
    assert host.read("versions/one/usr/lib64/libonload.so") == "0"
    assert host.read("usr/lib64/libonload.so") == "3"
    host.mounts("77")
    installed(host, "four")
    assert host.versions() == {"four"}


def test_nothing_is_removed_without_a_view_of_the_processes_of_the_node(host: Host) -> None:
    (host.proc / "1/mountinfo").unlink()
    for name in ("one", "two", "three"):
        installed(host, name)
    assert host.versions() == {"one", "two", "three"}


def test_other_content_of_the_same_name_replaces_it(host: Host) -> None:
    installed(host, "latest")
    host.mounts("77", "versions/latest/usr/lib64/libonload.so")
    host.release("longer")
    installed(host, "latest")
    assert host.read("usr/lib64/libonload.so") == "longer" * 3


def test_the_flat_layout_of_the_go_operator_becomes_a_version(host: Host) -> None:
    for path in ("usr/lib64", "sbin", "etc-of-others"):
        (host.host / path).mkdir(parents=True)
    (host.host / "usr/lib64/libonload.so").write_text("go")
    (host.host / "sbin/onload_cp_server").write_text("go")
    installed(host, "8.1-a")
    assert host.read("versions/flat/usr/lib64/libonload.so") == "go"
    assert host.read("usr/lib64/libonload.so") == "1"
    assert (host.host / "etc-of-others").is_dir()
    installed(host, "8.1-a")
    assert host.versions() == {"8.1-a"}


def test_an_interrupted_conversion_of_the_flat_layout_is_completed(host: Host) -> None:
    for path in ("versions/flat/usr/lib64", "sbin"):
        (host.host / path).mkdir(parents=True)
    (host.host / "versions/flat/usr/lib64/libonload.so").write_text("go")
    (host.host / "sbin/onload_cp_server").write_text("go")
    installed(host, "8.1-a")
    assert host.read("versions/flat/sbin/onload_cp_server") == "go"
    assert host.read("usr/lib64/libonload.so") == "1"


def test_directories_of_others_are_not_replaced(host: Host) -> None:
    (host.host / "usr").mkdir()
    (host.host / "usr/file").write_text("of others")
    result = host.install("8.1-a")
    assert result.returncode == 1
    assert "exists and is not a file of Onload; set hostOnloadPath to another directory" in result.stderr
    assert host.read("usr/file") == "of others"


def test_links_of_directories_that_the_new_version_lacks_are_removed(host: Host) -> None:
    (host.image / "etc").mkdir()
    installed(host, "one")
    (host.image / "etc").rmdir()
    (host.host / "foreign").symlink_to("nowhere")
    installed(host, "two")
    assert not (host.host / "etc").is_symlink()
    assert (host.host / "foreign").is_symlink()


@pytest.mark.parametrize("name", ["a b", "$(touch x)", "-rf", "a;b", "*"])
def test_names_are_not_interpreted_by_the_shell(host: Host, name: str) -> None:
    installed(host, name)
    assert host.versions() == {name}
    assert not (host.root / "x").exists()


def test_an_image_without_onload_fails_and_leaves_the_node_unchanged(host: Host) -> None:
    installed(host, "one")
    (host.image / "sbin/onload_cp_server").unlink()
    assert host.install("two").returncode != 0
    assert host.read("usr/lib64/libonload.so") == "1"
    assert host.versions() == {"one"}


def test_names_of_installations_differ_by_version_and_image() -> None:
    names = {installation_name(version, image) for version in ("1", "2") for image in ("a", "b")}
    assert len(names) == 4
    assert installation_name("8.1", "a").startswith("8.1-")
