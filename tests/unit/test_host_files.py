"""`Host` under a root and at `/`: reads, rejected paths, and messages."""

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from trees import PathInHost, link, write

from accelplane.host import Host, HostError, Missing, Unreadable, WriteError, files
from accelplane.host.files import ATTRIBUTE_LIMIT

pytestmark = pytest.mark.memory

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root makes device nodes and becomes another user")


class TestText:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"0x8086\n", "0x8086"),
            (b"", ""),
            (b"\n", ""),
            (b" \t two words \n\n", "two words"),
            (b"no newline", "no newline"),
            (b"a\nb\n", "a\nb"),
            ("größer\n".encode(), "größer"),
            (b"a\0b", "a\0b"),
            (b"x" * ATTRIBUTE_LIMIT, "x" * ATTRIBUTE_LIMIT),
        ],
    )
    def test_text_is_the_content_without_surrounding_white_space(
        self, path_in_host: PathInHost, tmp_path: Path, content: bytes, text: str
    ) -> None:
        host, name = path_in_host
        write(tmp_path / "attribute", content)
        assert host.text(name("attribute")) == text

    @pytest.mark.parametrize("under_a_root", [False, True])
    def test_a_seq_file_is_read_to_its_end(self, under_a_root: bool) -> None:
        stop = "import mmap, os, signal; maps = [mmap.mmap(-1, 4096) for _ in range(99)]; os.kill(0, signal.SIGSTOP)"
        with subprocess.Popen([sys.executable, "-c", stop], process_group=0) as child:
            try:
                os.waitpid(child.pid, os.WUNTRACED)  # a stopped process keeps its mappings
                directory = f"/proc/{child.pid}"
                expected = Path(f"{directory}/maps").read_text()
                host, path = (Host(directory), "/maps") if under_a_root else (Host(), f"{directory}/maps")
                found = host.raw_text(path)
            finally:
                child.kill()
        assert len(expected) > os.sysconf("SC_PAGE_SIZE")
        assert found == expected

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"\x80", b"ok until \xc3", bytes(range(256))])
    def test_content_that_is_not_text_is_rejected(
        self, path_in_host: PathInHost, tmp_path: Path, content: bytes
    ) -> None:
        host, name = path_in_host
        write(tmp_path / "attribute", content)
        with pytest.raises(Unreadable, match=r"attribute: not text: ([0-9a-f]{2} ?)+…"):
            host.text(name("attribute"))

    def test_too_long_content_is_rejected(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        os.truncate(write(tmp_path / "attribute", ""), 1 << 40)
        with pytest.raises(Unreadable, match="more than 65536 bytes"):
            host.text(name("attribute"))

    @pytest.mark.parametrize("path", ["none", "none/deeper", "empty/none"])
    def test_a_missing_file_raises_missing(self, path_in_host: PathInHost, tmp_path: Path, path: str) -> None:
        host, name = path_in_host
        (tmp_path / "empty").mkdir()
        with pytest.raises(Missing) as caught:
            host.text(name(path))
        assert str(caught.value) == f"{name(path)}: No such file or directory"
        assert caught.value.path == name(path)

    def test_reading_a_directory_is_rejected(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        (tmp_path / "directory").mkdir()
        with pytest.raises(Unreadable, match="directory: Is a directory"):
            host.text(name("directory"))

    def test_a_path_through_a_file_is_rejected(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "")
        with pytest.raises(Unreadable, match="file/x: Not a directory"):
            host.text(name("file/x"))

    def test_reading_a_fifo_does_not_block(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(Unreadable, match="fifo: not a regular file"):
            host.text(name("fifo"))

    def test_reading_a_fifo_with_a_writer_does_not_block(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        os.mkfifo(tmp_path / "fifo")
        writer = os.open(tmp_path / "fifo", os.O_RDWR)
        try:
            os.write(writer, b"text")
            with pytest.raises(Unreadable, match="fifo: not a regular file"):
                host.text(name("fifo"))
        finally:
            os.close(writer)

    def test_reading_a_socket_is_rejected(
        self, path_in_host: PathInHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host, name = path_in_host
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
            with pytest.raises(HostError, match="socket: No such device or address"):
                host.text(name("socket"))

    @needs_root
    def test_reading_an_endless_device_is_rejected(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        os.mknod(tmp_path / "zero", 0o600 | 0o020000, os.makedev(1, 5))
        with pytest.raises(Unreadable, match="zero: not a regular file"):
            host.text(name("zero"))

    @needs_root
    def test_a_device_without_driver_raises_missing(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        os.mknod(tmp_path / "ghost", 0o600 | 0o020000, os.makedev(240, 1234))
        with pytest.raises(HostError, match="ghost: No such device"):
            host.text(name("ghost"))

    @pytest.mark.parametrize("path", ["a\0b", "a\0b/c", "a/b\0c"])
    def test_a_path_with_a_zero_byte_is_rejected(self, path_in_host: PathInHost, tmp_path: Path, path: str) -> None:
        host, name = path_in_host
        write(tmp_path / "a" / "x", "")
        with pytest.raises(Unreadable) as caught:
            host.text(name(path))
        assert "no path" in str(caught.value)
        assert str(caught.value).isprintable()

    def test_a_too_long_name_is_rejected(self, path_in_host: PathInHost) -> None:
        host, name = path_in_host
        with pytest.raises(Unreadable, match="File name too long"):
            host.text(name("x" * 300))

    def test_files_with_names_that_are_not_utf8_are_read(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / os.fsdecode(b"caf\xe9"), "here")
        assert host.names(name("")) == ["caf\udce9"]
        assert host.text(name("caf\udce9")) == "here"

    def test_errors_for_unusual_file_names_have_one_line(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        (tmp_path / "E0101 all is lost\n").mkdir()
        with pytest.raises(Unreadable) as caught:
            host.text(name("E0101 all is lost\n"))
        assert str(caught.value).isprintable()

    def test_reading_without_permission_is_rejected(self, tmp_path: Path) -> None:
        write(tmp_path / "secret", "x")
        (tmp_path / "secret").chmod(0)
        script = (
            "import os, sys\n"
            "from accelplane.host import Host, Unreadable\n"
            "if os.geteuid() == 0: os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
            "for host, path in ((Host(sys.argv[1]), '/secret'), (Host(), sys.argv[1] + '/secret')):\n"
            "    try: host.text(path)\n"
            "    except Unreadable as error: print(error)\n"
        )
        for directory in (tmp_path, *tmp_path.parents):
            if directory.name.startswith(("pytest-", tmp_path.name)):  # made for this user alone
                directory.chmod(0o755)
        result = subprocess.run(
            [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True, cwd="/"
        )
        assert result.stdout.splitlines() == ["/secret: Permission denied", f"{tmp_path}/secret: Permission denied"]


class TestNames:
    def test_names_are_in_byte_order(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        for entry in ("card10", "card2", "Card", ".hidden", "é", os.fsdecode(b"\xff"), "~"):
            write(tmp_path / "d" / entry, "")
        assert host.names(name("d")) == [".hidden", "Card", "card10", "card2", "~", "é", "\udcff"]

    def test_listing_a_missing_directory_raises_missing(self, path_in_host: PathInHost) -> None:
        host, name = path_in_host
        with pytest.raises(Missing):
            host.names(name("none"))

    def test_listing_a_file_is_an_error(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "")
        with pytest.raises(Unreadable, match="Not a directory"):
            host.names(name("file"))

    def test_listing_too_many_entries_is_rejected(
        self, path_in_host: PathInHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host, name = path_in_host
        monkeypatch.setattr(files, "DIRECTORY_LIMIT", 100)
        for number in range(101):
            write(tmp_path / "huge" / f"{number}", "")
        with pytest.raises(Unreadable, match="huge: more than 100 entries"):
            host.names(name("huge"))
        os.unlink(tmp_path / "huge" / "0")
        assert len(host.names(name("huge"))) == 100

    def test_listing_a_path_with_a_zero_byte_is_rejected(self, path_in_host: PathInHost) -> None:
        host, name = path_in_host
        with pytest.raises(HostError):
            host.names(name("a\0b"))


class TestStatus:
    @pytest.mark.parametrize("path", ["none", "file/below", "a\0b", "x" * 300, "y/" * 3000])
    def test_the_status_of_an_invalid_path_is_none(self, path_in_host: PathInHost, tmp_path: Path, path: str) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "")
        assert host.status(name(path)) is None

    def test_the_status_follows_links(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "12345")
        link(tmp_path / "link", "file")
        status = host.status(name("link"))
        assert status is not None
        assert status.st_size == 5

    def test_plain_files_and_directories_replace_device_nodes_only_below_a_root(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path, replaces in ((write(tmp_path / "card0", ""), True), (tmp_path, True), (tmp_path / "fifo", False)):
            assert Host(tmp_path).is_plain_stand_in(os.stat(path)) is replaces
            assert not Host().is_plain_stand_in(os.stat(path))


class TestGlob:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        for path in ("a/x1", "a/x2", "a/x10", "a/.x", "a/y[1]", "b/x1", ".h/x1", "a/*"):
            write(tmp_path / path, "")
        link(tmp_path / "c", "a")
        link(tmp_path / "dangling", "/none")
        return tmp_path

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("/a/x1", ["/a/x1"]),
            ("/a/none", []),
            ("/none/*", []),
            ("/a/x1/*", []),
            ("/a/x?", ["/a/x1", "/a/x2"]),
            ("/a/x*", ["/a/x1", "/a/x10", "/a/x2"]),
            ("/a/x[2-9]", ["/a/x2"]),
            ("/a/x[!2]", ["/a/x1"]),
            ("/a/[*]", ["/a/*"]),
            ("/a/*", ["/a/*", "/a/x1", "/a/x10", "/a/x2", "/a/y[1]"]),
            ("/a/.*", ["/a/.x"]),
            ("/*/x1", ["/a/x1", "/b/x1", "/c/x1"]),
            ("/.*/x1", ["/.h/x1"]),
            ("/*/*2", ["/a/x2", "/c/x2"]),
            ("/*", ["/a", "/b", "/c"]),
            ("//a//x1/", ["/a/x1"]),
            ("/", ["/"]),
            ("", ["/"]),
            ("/a/../b/*", ["/a/../b/x1"]),
            ("/a/x*/", ["/a/x1", "/a/x10", "/a/x2"]),
            ("/a/[", []),
            ("/a\0/*", []),
        ],
    )
    def test_patterns_match_by_path_component(self, tree: Path, pattern: str, found: list[str]) -> None:
        assert list(Host(tree).glob(pattern)) == found

    def test_patterns_have_no_depth_limit_below_path_max(self, tmp_path: Path) -> None:
        assert list(Host(tmp_path).glob("/x" * 2000 + "/*")) == []

    def test_patterns_match_equally_at_the_root_of_the_host(self, tree: Path) -> None:
        assert list(Host().glob(f"{tree}/*/x1")) == [f"{tree}/{name}/x1" for name in "abc"]


class TestSysfs:
    def test_devices_of_a_class_are_its_entries(self, tmp_path: Path) -> None:
        (tmp_path / "sys/devices/card1").mkdir(parents=True)
        link(tmp_path / "sys/class/drm/card1", tmp_path / "sys/devices/card1")
        write(tmp_path / "sys/class/drm/version", "")
        (tmp_path / "sys/bus/dsa/devices/wq0.0").mkdir(parents=True)
        host = Host(tmp_path)
        assert host.class_devices("drm") == [
            ("card1", "/sys/class/drm/card1"),
            ("version", "/sys/class/drm/version"),
        ]
        assert host.class_devices("dsa", bus=True) == [("wq0.0", "/sys/bus/dsa/devices/wq0.0")]
        assert host.class_devices("none") == []
        assert host.class_devices("none", bus=True) == []

    def test_a_class_that_is_not_a_directory_is_unreadable(self, tmp_path: Path) -> None:
        write(tmp_path / "sys/class/drm", "")
        with pytest.raises(Unreadable, match="/sys/class/drm: Not a directory"):
            Host(tmp_path).class_devices("drm")

    def test_functions_have_their_ids_and_invalid_ids_are_reported(self, tmp_path: Path) -> None:
        def function(name: str, **attributes: str) -> None:
            (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
            for key, value in attributes.items():
                write(tmp_path / "sys/bus/pci/devices" / name / key, f"{value}\n")

        function("0000:00:02.0", vendor="0x8086", device="0x56c0", **{"class": "0x030000"})
        function("0000:03:00.1", vendor="0x10de", device="0x2330", **{"class": "0x030200"})
        function("10000:e1:00.0", vendor="0x8086", device="0x0b60", **{"class": "0x010802"})
        function("0000:04:00.0", device="0x56c0")
        function("0000:05:00.0", vendor="0x8086", device="0x56c0")
        function("not-an-address", vendor="0x8086", device="0x1", **{"class": "0x1"})
        host = Host(tmp_path)
        assert [
            (function.address, function.vendor, function.device, function.cls) for function in host.pci_devices()
        ] == [
            ("0000:00:02.0", "0x8086", "0x56c0", "0x030000"),
            ("0000:03:00.1", "0x10de", "0x2330", "0x030200"),
            ("10000:e1:00.0", "0x8086", "0x0b60", "0x010802"),
        ]
        assert [note.partition(":/")[0] for note in host.notes] == [
            "PCI function 0000:04:00.0 skipped: /sys/bus/pci/devices/0000:04:00.0/vendor: No such file or directory",
            "PCI function 0000:05:00.0 skipped: /sys/bus/pci/devices/0000:05:00.0/class: No such file or directory",
        ]
        assert [function.address for function in host.pci_devices("0x10de")] == ["0000:03:00.1"]
        assert host.pci_devices("0xffff") == []

    def test_a_host_without_pci_has_no_functions(self, tmp_path: Path) -> None:
        assert Host(tmp_path).pci_devices() == []

    @pytest.mark.parametrize(
        ("target", "driver"),
        [("../../../bus/pci/drivers/i915", "i915"), ("/none/xe/", "xe"), ("vfio-pci", "vfio-pci")],
    )
    def test_the_driver_is_the_last_component_of_its_link(self, tmp_path: Path, target: str, driver: str) -> None:
        link(tmp_path / "card0/device/driver", target)
        assert Host(tmp_path).driver("/card0/device") == driver

    def test_a_driver_entry_that_is_not_a_link_is_ignored(self, tmp_path: Path) -> None:
        write(tmp_path / "one/driver", "i915")
        (tmp_path / "two").mkdir()
        with pytest.raises(Unreadable, match="not a symbolic link"):
            Host(tmp_path).driver("/one")
        with pytest.raises(Missing):
            Host(tmp_path).driver("/two")

    @pytest.mark.parametrize(
        ("content", "count"),
        [(b"0\n", "0"), (b"7\n", "7"), (b"\n", ""), (b"-1", "-1"), (b"junk", "junk"), (b"\xff", "-1"), (None, "-1")],
    )
    def test_virtual_functions_are_counted_as_the_kernel_writes_them(
        self, tmp_path: Path, content: bytes | None, count: str
    ) -> None:
        (tmp_path / "card").mkdir()
        if content is not None:
            write(tmp_path / "card/sriov_numvfs", content)
        host = Host(tmp_path)
        assert host.vf_count("/card") == count

    def test_a_function_with_a_physfn_link_is_virtual(self, tmp_path: Path) -> None:
        (tmp_path / "pf").mkdir()
        link(tmp_path / "vf/physfn", tmp_path / "pf")
        host = Host(tmp_path)
        assert host.is_vf("/vf")
        assert not host.is_vf("/pf")


def test_a_text_is_written_unchanged(tmp_path: Path) -> None:
    attribute = write(tmp_path / "sys/bus/pci/drivers/vfio-pci/bind", "what was there before")
    Host(tmp_path).write("/sys/bus/pci/drivers/vfio-pci/bind", "0000:6b:00.1")
    assert attribute.read_text() == "0000:6b:00.1"


def test_missing_attributes_of_plain_trees_are_created_for_the_owner_only(tmp_path: Path) -> None:
    (tmp_path / "sys/driver").mkdir(parents=True)
    Host(tmp_path).write("/sys/driver/new_id", "8086 4941")
    assert (tmp_path / "sys/driver/new_id").read_text() == "8086 4941"
    assert stat.S_IMODE((tmp_path / "sys/driver/new_id").stat().st_mode) == 0o600


def test_a_write_never_leaves_the_root(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", "untouched")
    root = tmp_path / "root"
    link(root / "sys/attribute", str(outside))
    with pytest.raises(Missing):
        Host(root).write("/sys/attribute", "text")
    link(root / "sys/way", "../../outside")
    Host(root).write("/sys/way", "text")
    assert outside.read_text() == "untouched"
    assert (root / "outside").read_text() == "text"


@pytest.mark.parametrize("place", ["/sys/missing/attribute", "/sys/bus/x"])
def test_writing_in_a_missing_directory_raises_missing(tmp_path: Path, place: str) -> None:
    with pytest.raises(Missing, match=place):
        Host(tmp_path).write(place, "1")


def test_a_failed_write_reports_file_reason_and_text(tmp_path: Path) -> None:
    (tmp_path / "sys/attribute").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"/sys/attribute: .*irectory \(writing '1'\)") as caught:
        Host(tmp_path).write("/sys/attribute", "1")
    assert caught.value.errno == errno.EISDIR
