"""`Host` below a root: links, and a tree that changes during calls."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from trees import PathInHost, link, write

from accelplane.host import Host, HostError, Missing, Unreadable

pytestmark = pytest.mark.memory


class TestLinks:
    """Under a root, as after chroot(2)."""

    @pytest.mark.parametrize(
        ("target", "path"),
        [
            ("inside", "/link"),
            ("/inside", "/link"),
            ("///inside", "/link"),
            ("./inside", "/link"),
            ("../inside", "/link"),
            ("../../../../inside", "/link"),
            ("/../inside", "/link"),
            ("deep/../inside", "/link"),
            ("deep", "/link/../inside"),
            ("deep/deeper", "/link/../../inside"),
            (".", "/link/inside"),
            ("/", "/link/inside"),
            ("..", "/link/inside"),
        ],
    )
    def test_links_are_followed_inside_the_root(self, tmp_path: Path, target: str, path: str) -> None:
        root = tmp_path / "root"
        write(tmp_path / "inside", "outside!")
        write(root / "inside", "inside")
        (root / "deep/deeper").mkdir(parents=True)
        link(root / "link", target)
        host = Host(root)
        assert host.text(path) == "inside"
        assert host.resolve(path) == "/inside"
        assert host.local(path) == f"{root}/inside"
        assert host.exists(path)

    @pytest.mark.parametrize(
        ("target", "path"),
        [
            ("{root}/inside", "/link"),
            ("{root}", "/link/inside"),
            ("{root}/", "/link/inside"),
            ("{root}/deep/../inside", "/link"),
            ("{root}/../../inside", "/link"),
        ],
    )
    def test_links_to_the_real_path_of_the_root_are_followed_inside_it(
        self, tmp_path: Path, target: str, path: str
    ) -> None:
        root = tmp_path / "root"
        write(tmp_path / "inside", "outside!")
        write(root / "inside", "inside")
        (root / "deep").mkdir()
        link(root / "link", target.format(root=root))
        host = Host(root)
        assert host.text(path) == "inside"
        assert host.resolve(path) == "/inside"
        assert host.exists(path)

    @pytest.mark.parametrize(
        "target", ["{canary}", "../canary", "../../../../../../../../../../{canary}", "/../canary"]
    )
    def test_links_never_resolve_outside_the_root(self, tmp_path: Path, target: str) -> None:
        canary = write(tmp_path / "canary", "outside")
        link(tmp_path / "root/link", target.format(canary=canary))
        link(tmp_path / "root/directory", target.format(canary=tmp_path).removesuffix("/canary"))
        host = Host(tmp_path / "root")
        for path in ("/link", "/directory/canary", "/../canary", "/link/../../canary"):
            with pytest.raises(Missing):
                host.text(path)
            assert not host.exists(path)
            assert host.local(path).startswith(f"{tmp_path}/root/")

    @pytest.mark.parametrize(("one", "other"), [("other", "one"), ("/other", "/one"), ("other/x", "one/y")])
    def test_link_loops_are_rejected_with_the_cause(self, tmp_path: Path, one: str, other: str) -> None:
        link(tmp_path / "one", one)
        link(tmp_path / "other", other)
        host = Host(tmp_path)
        for look in (host.resolve, host.local, host.text, host.names):
            with pytest.raises(Unreadable, match="/one: more than 40 symbolic links; check for a loop"):
                look("/one")
        with pytest.raises(HostError):
            host.text("/one/deeper")
        assert not host.exists("/one")
        assert not host.exists("/one/deeper")

    def test_link_loops_are_rejected_at_the_root_of_the_host(self, tmp_path: Path) -> None:
        link(tmp_path / "loop", "loop")
        host = Host()
        for look in (host.text, host.names, host.resolve):
            with pytest.raises(Unreadable, match="loop: "):
                look(f"{tmp_path}/loop")
        assert not host.exists(f"{tmp_path}/loop")

    def test_links_are_followed_up_to_the_limit_of_the_kernel(self, tmp_path: Path) -> None:
        write(tmp_path / "link0", "reached")
        for number in range(1, 42):
            link(tmp_path / f"link{number}", f"link{number - 1}")
        host = Host(tmp_path)
        assert host.text("/link40") == "reached"
        with pytest.raises(Unreadable):
            host.text("/link41")

    def test_links_that_expand_without_limit_are_rejected(self, tmp_path: Path) -> None:
        link(tmp_path / "x", "x/x/x/x/x/x/x/x")
        with pytest.raises(Unreadable):
            Host(tmp_path).resolve("/x")

    def test_dangling_links_do_not_resolve(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        link(tmp_path / "dangling", "nowhere")
        with pytest.raises(Missing):
            host.text(name("dangling"))
        assert not host.exists(name("dangling"))
        assert host.link(name("dangling")) == "nowhere"

    def test_link_targets_are_returned_as_stored(self, path_in_host: PathInHost, tmp_path: Path) -> None:
        host, name = path_in_host
        write(tmp_path / "file", "")
        link(tmp_path / "link", "/some/../where")
        assert host.link(name("link")) == "/some/../where"
        with pytest.raises(Unreadable, match="file: not a symbolic link"):
            host.link(name("file"))
        with pytest.raises(Missing):
            host.link(name("none"))
        with pytest.raises(Unreadable):
            host.link(name("a\0b"))

    def test_a_root_that_is_a_link_is_resolved(self, tmp_path: Path) -> None:
        write(tmp_path / "real/file", "text")
        link(tmp_path / "link", "real")
        host = Host(tmp_path / "link")
        assert host.root == str(tmp_path / "real")
        assert host.text("/file") == "text"

    def test_a_path_with_the_root_as_a_name_prefix_is_outside(self, tmp_path: Path) -> None:
        write(tmp_path / "root-and-more/file", "outside")
        link(tmp_path / "root/link", f"{tmp_path}/root-and-more/file")
        link(tmp_path / "root/other", "../root-and-more/file")
        host = Host(tmp_path / "root")
        assert not host.exists("/link")
        assert not host.exists("/other")


class TestRacingTree:
    """Others replace a directory of the tree by a link that leads out of it, between or during calls."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for place, content in (("root/sys/device", "inside"), ("outside", "canary")):
            write(tmp_path / place / "attribute", content)
            write(tmp_path / place / content, "")
            link(tmp_path / place / "driver", content)
        return tmp_path / "root"

    def swap(self, root: Path) -> None:
        (root / "sys/device").rename(root / "sys/real")
        link(root / "sys/device", root.parent / "outside")

    def swap_back(self, root: Path) -> None:
        (root / "sys/device").unlink()
        (root / "sys/real").rename(root / "sys/device")

    def test_a_swap_after_resolution_never_escapes_the_root(self, root: Path) -> None:
        host = Host(root)
        assert host.text("/sys/device/attribute") == "inside"
        self.swap(root)
        assert host.text("/sys/device/attribute") == "inside"
        assert host.names("/sys/device") == ["attribute", "driver", "inside"]
        assert host.link("/sys/device/driver") == "inside"
        assert not host.exists("/sys/device/canary")
        with pytest.raises(Missing):
            Host(root).text("/sys/device/attribute")

    def test_a_concurrent_swap_never_causes_reads_or_writes_outside_the_root(self, root: Path, tmp_path: Path) -> None:
        done = threading.Event()

        def swap_again_and_again() -> None:
            while not done.is_set():
                self.swap(root)
                self.swap_back(root)

        known = Host(root)
        calls: Sequence[Callable[[Host], object]] = (
            lambda host: host.text("/sys/device/attribute"),
            lambda host: known.read_once("/sys/device/attribute", 100).decode(),
            lambda host: host.names("/sys/device"),
            lambda host: host.link("/sys/device/driver"),
            lambda host: host.resolve("/sys/device/driver"),
            lambda host: host.exists("/sys/device/canary") and "canary",
            lambda host: host.write("/sys/device/attribute", "inside"),
        )
        thread = threading.Thread(target=swap_again_and_again)
        thread.start()
        answers: list[str] = []
        try:
            for number in range(6_000):
                with contextlib.suppress(HostError):
                    answers.append(str(calls[number % len(calls)](Host(root))))
        finally:
            done.set()
            thread.join()
        assert not [answer for answer in answers if "canary" in answer]
        assert "inside" in answers
        assert (tmp_path / "outside/attribute").read_text() == "canary"


class TestDirectoriesRead:
    def test_read_directories_are_recorded(self, tmp_path: Path) -> None:
        write(tmp_path / "real/a", "")
        link(tmp_path / "link", "real")
        host = Host(tmp_path)
        host.text("/link/a")
        host.exists("/dev/dri/card0")
        host.names("/link")
        with pytest.raises(Missing):
            host.link("/sys/none")
        where_the_link_is = "/"
        assert host.directories_read == {where_the_link_is, "/real", "/dev/dri", "/sys"}


def test_a_fresh_host_has_the_same_root_and_no_cache(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/device/numa_node"
    write(node, "0\n")
    host = Host(tmp_path)
    assert host.topology_of("/sys/devices/device") == (0,)
    host.note("odd")
    write(node, "1\n")
    other = host.fresh()
    assert (other.root, other.notes, other.directories_read) == (host.root, [], set())
    assert other.topology_of("/sys/devices/device") == (1,)
    assert host.notes == ["odd"]


def test_links_are_read_again_after_a_write(tmp_path: Path) -> None:
    device = tmp_path / "sys/device"
    write(device / "attribute", "")
    link(device / "driver", tmp_path / "sys/drivers/old")
    host = Host(tmp_path)
    assert host.resolve("/sys/device/driver") == "/sys/drivers/old"
    (device / "driver").unlink()
    link(device / "driver", tmp_path / "sys/drivers/new")
    host.write("/sys/device/attribute", "1")
    assert host.resolve("/sys/device/driver") == "/sys/drivers/new"


def test_paths_are_resolved_once_until_a_write(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/device/numa_node"
    write(node, "0\n")
    host = Host(tmp_path)
    assert host.topology_of("/sys/devices/device") == (0,)
    write(node, "1\n")
    assert host.topology_of("/sys/devices/device") == (0,)
    host.write("/sys/devices/device/attribute", "1")
    assert host.topology_of("/sys/devices/device") == (1,)
