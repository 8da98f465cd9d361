"""With any tree, a `Host` behaves as documented, reads nothing outside and never blocks."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.host import Host, HostError

pytestmark = pytest.mark.memory

CANARY = "the canary outside has been read"

# Few names, so that paths, links and files collide, and the names that the tested code reads.
NAMES = st.sampled_from(
    [
        *("a", "b", "c", "sys", "dev", "devices", "class", "bus", "pci", "drm", "card0", "driver", "physfn", "device"),
        *("numa_node", "local_cpulist", "slaves", "vendor", "sriov_numvfs", "0000:00:02.0", "virtual", "vfio", "7"),
        *("\udcff", "new\nline", "*", "[a]", "?", ".hidden", "x" * 255),
    ]
)
ODD_NAMES = st.sampled_from(["", ".", "..", "x" * 256, "z\0z", "canary", "outside"])
PATHS = st.one_of(
    st.lists(NAMES | ODD_NAMES, max_size=8).map("/".join),
    st.sampled_from(
        [
            *("sys/class/drm/card0", "sys/bus/pci/devices/0000:00:02.0", "sys/devices/pci/0000:00:02.0"),
            *("sys/devices/virtual/vfio/7", "sys/kernel/iommu_groups/7/devices/a", "dev/card0", "sys/devices/a/slaves"),
            *("sys/devices/a/slaves/b", "sys/devices/a/slaves/a", "sys/devices/b/slaves/a", "sys/devices/b/slaves/b"),
            *("sys/devices/a/numa_node", "sys/devices/a/local_cpulist", "sys/class/a/card0"),
        ]
    ),
)
TARGETS = st.one_of(
    PATHS,
    PATHS.map("/{}".format),
    PATHS.map("../{}".format),
    st.sampled_from(
        [
            *(
                ".",
                "..",
                "/",
                "../canary",
                "../../canary",
                "../../../../../../canary",
                "/../canary",
                "{outside}/canary",
            ),
            *("{outside}", "../outside", "..//..", "/a/../../canary", "a/" * 2000, "../" * 1300 + "canary"),
        ]
    ),
)
CONTENTS = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [b"0\n", b"-1\n", b"0,1\n", b"0-3\n", b"\n", b"99999999999999999999", b"7" * 70_000, b"-1,0", b"0x8086\n"]
    ),
)

Deed = tuple[str, str | bytes | None]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A hanging read is interrupted and fails the test."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still looking after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def create_entry(root: str, outside: str, kind: str, path: str, matter: str | bytes) -> None:
    """Creates an entry of this type at the path, if possible."""
    # All files are created inside; only targets of links lead outside.
    if ".." in path.split("/"):
        return
    place = f"{root}/{path}"
    try:
        if os.path.realpath(os.path.dirname(place)) != root and not os.path.realpath(place).startswith(f"{root}/"):
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        match kind, matter:
            case "link", str():
                os.symlink(matter.replace("{outside}", outside), place)
            case "file", bytes():
                with open(place, "xb") as file:
                    file.write(matter)
            case "fifo", _:
                os.mkfifo(place)
            case _:
                os.makedirs(f"{place}/deep" + "/d" * 300, exist_ok=True)
    except (OSError, ValueError):
        pass


def read_all(host: Host, path: str) -> Iterator[Callable[[], object]]:
    """All methods that read the path."""
    yield lambda: host.text(path)
    yield lambda: host.read_once(path, 100)
    yield lambda: host.read_once(path, 100)  # with cached directories
    yield lambda: host.names(path)
    yield lambda: host.link(path)
    yield lambda: host.resolve(path)
    yield lambda: host.local(path)
    yield lambda: host.exists(path)
    yield lambda: host.status(path) and None
    yield lambda: list(host.glob(path))
    yield lambda: list(host.glob(f"{path}/*"))
    yield lambda: list(host.glob(f"{path}/*/*"))
    yield lambda: host.driver(path)
    yield lambda: host.vf_count(path)
    yield lambda: host.is_vf(path)
    yield lambda: host.topology_of(path)
    yield lambda: host.topology_of_nodes([path])
    yield lambda: host.class_devices(path.strip("/"))
    yield lambda: host.class_devices(path.strip("/"), bus=True)
    yield host.pci_devices


DEEDS = st.one_of(
    st.tuples(st.just("link"), PATHS, TARGETS),
    st.tuples(st.just("file"), PATHS, CONTENTS),
    st.tuples(st.just("fifo"), PATHS, st.just(b"")),
    st.tuples(st.just("deep"), PATHS, st.just(b"")),
)


@given(st.lists(DEEDS, max_size=15), st.lists(PATHS.map("/{}".format), min_size=1, max_size=5))
def test_a_hostile_tree_causes_only_documented_errors_and_no_access_outside(
    tmp_path: Path, changes: list[tuple[str, str, str | bytes]], paths: list[str]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory, at_most(60):
        base = os.path.realpath(directory)
        root, outside = f"{base}/root", f"{base}/outside"
        for path in (root, outside, f"{outside}/{CANARY}"):
            os.mkdir(path)
        for canary in (f"{base}/canary", f"{outside}/canary", f"{outside}/vendor", f"{outside}/numa_node"):
            Path(canary).write_text(CANARY)
        for kind, path, matter in changes:
            create_entry(root, outside, kind, path, matter)
        host = Host(root)
        planted = [f"/{path}" for _kind, path, _matter in changes]
        for path in (*paths, *planted, *(f"{path}/x" for path in planted)):
            for look in read_all(host, path):
                try:
                    answer = look()
                except HostError as error:
                    answer = str(error)
                    assert answer.isprintable()
                assert CANARY not in str(answer)
            try:
                local = host.local(path)
            except HostError:
                continue
            assert local == root or local.startswith(f"{root}/")
            # The path has no links, so the kernel resolves it to itself.
            if os.path.lexists(local):
                assert os.path.realpath(local) == local.rstrip("/")
        assert CANARY not in "".join(host.notes)
        assert all(f"{root}{path}/".startswith(f"{root}/") for path in host.directories_read)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=30))
def test_each_slave_is_visited_once(tmp_path: Path, links: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as root, at_most(60):
        for start, end in links:
            create_entry(root, root, "link", f"sys/devices/{start}/slaves/{end}", f"/sys/devices/{end}")
            create_entry(root, root, "file", f"sys/devices/{end}/numa_node", b"1")
        host = Host(root)
        for start, _end in links:
            assert host.topology_of(f"/sys/devices/{start}") in (None, (1,))
