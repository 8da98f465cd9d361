"""`Host.read_once` and `Host.names_again`: repeated reads, for which directories stay open."""

import os
from pathlib import Path

import pytest
from trees import PathInHost, link, write

from accelplane.host import Host, HostError, Missing

pytestmark = pytest.mark.memory


class TestReadOnce:
    def test_a_read_is_limited_to_the_given_number_of_bytes(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "file", b"a\xff\0\n")
        assert [host.read_once(name("file"), size) for size in (2, 100)] == [b"a\xff", b"a\xff\0\n"]

    @pytest.mark.parametrize("path", ["none", "file/below", "a\0b", "x" * 300, "directory", "directory/.."])
    def test_an_invalid_path_raises_the_error_of_a_complete_read(
        self, path_in_host: PathInHost, tmp_path: Path, path: str
    ) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "")
        (tmp_path / "directory").mkdir()
        for _ in range(2):
            with pytest.raises(HostError) as found:
                host.read_once(name(path), 100)
            with pytest.raises(type(found.value)) as expected:
                host.read_bytes(name(path))
            assert found.value.errno == expected.value.errno

    def test_links_of_files_and_directories_are_followed(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "real/file", "text")
        link(tmp_path / "directory", "real")
        link(tmp_path / "real/link", "file")
        assert [host.read_once(name(path), 100) for path in ("directory/file", "directory/link")] == [b"text"] * 2

    def test_a_replaced_directory_is_found(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "old/file", "old")
        write(tmp_path / "new/file", "new")
        link(tmp_path / "directory", "old")
        assert host.read_once(name("directory/file"), 100) == b"old"
        (tmp_path / "directory").unlink()
        link(tmp_path / "directory", "new")
        (tmp_path / "old/file").unlink()
        assert host.read_once(name("directory/file"), 100) == b"new"

    def test_a_known_directory_is_listed_again(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "old/one", "")
        write(tmp_path / "new/two", "")
        link(tmp_path / "directory", "old")
        for path in ("directory", "old"):
            assert [host.names_again(name(path)) for _ in range(2)] == [["one"]] * 2
        (tmp_path / "directory").unlink()
        link(tmp_path / "directory", "new")
        (tmp_path / "old/one").unlink()
        (tmp_path / "old").rmdir()
        assert host.names_again(name("directory")) == ["two"]
        for path in ("old", "new/two", "a\0b"):
            with pytest.raises(HostError) as expected:
                host.names(name(path))
            with pytest.raises(type(expected.value)) as found:
                host.names_again(name(path))
            assert (found.value.errno, str(found.value)) == (expected.value.errno, str(expected.value))

    def test_directories_stay_open_although_another_file_does_not_exist(
        self, path_in_host: PathInHost, tmp_path: Path
    ) -> None:
        host, name = path_in_host
        for path in ("a/b/file", "c/file"):
            write(tmp_path / path, "text")
            host.read_once(name(path), 100)
        before = open_directories(tmp_path)
        assert {"a/b", "c"} <= set(before)
        for _ in range(2):
            with pytest.raises(Missing):
                host.read_once(name("c/none"), 100)
            assert open_directories(tmp_path) == before

    @pytest.mark.parametrize("root", [True, False])
    def test_open_directories_are_limited_and_closed_with_the_host(self, tmp_path: Path, root: bool) -> None:
        host = Host(tmp_path, open_directories=3) if root else Host(open_directories=3)
        before = os.listdir("/proc/self/fd")
        for number in range(8):
            write(tmp_path / f"d{number}/file", str(number))
            for path in (f"d{number}/file", "d0/file"):
                expected = path[1].encode()
                assert host.read_once(f"/{path}" if root else f"{tmp_path}/{path}", 100) == expected
                assert len(os.listdir("/proc/self/fd")) <= len(before) + (6 if root else 3)
        del host
        assert os.listdir("/proc/self/fd") == before


def open_directories(root: Path) -> list[str]:
    """The directories below `root` that this process has open."""
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sorted(os.path.relpath(target, root) for target in targets if target.startswith(f"{root}/"))
