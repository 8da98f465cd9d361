"""From files under /dev and directories of sysfs to NUMA nodes, row by row of the specification's tables."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.host import Host

pytestmark = pytest.mark.memory

CHAR, BLOCK = 0o020600, 0o060600
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")

NUMA_TEXTS = st.one_of(
    st.text(max_size=12),
    st.lists(st.integers(-2, 9).map(str), max_size=4).map(",".join),
    st.sampled_from(["99999999999999999999", "9" * 5000, "0x1", "1_0", "0\n1", "\0", "+1", " 1", "٣"]),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def directory(root: Path, path: str, *, numa: str | None = None, cpus: str | None = None) -> Path:
    """A sysfs directory with its NUMA attributes."""
    path_ = root / "sys/devices" / path
    path_.mkdir(parents=True, exist_ok=True)
    if numa is not None:
        write(path_ / "numa_node", f"{numa}\n")
    if cpus is not None:
        write(path_ / "local_cpulist", f"{cpus}\n")
    return path_


class TestPlaceOfADirectory:
    @pytest.mark.parametrize(
        ("cpus", "numa", "nodes"),
        [
            ("0-3", "0", (0,)),
            ("0-3", "1", (1,)),
            ("0-3", "-1", None),
            ("", "-1", None),
            (None, "-1", None),
            ("0-3", None, None),
            ("0-3", "", None),
            (None, None, None),
            # Beyond: also without a list of CPUs
            (None, "2", (2,)),
            ("0-3", "1,0", (0, 1)),
            ("0-3", "0, 1", (0, 1)),
            ("0-3", "3,3,3", (3,)),
            # garbage
            ("0-3", "x", None),
            ("0-3", "-1,0", None),
            ("0-3", "0,-2", None),
            ("0-3", "1,,2", None),
            ("0-3", "99999999999", None),
            ("0-3", "9" * 5000, None),
        ],
    )
    def test_the_numa_node_of_a_directory_is_that_of_its_attribute(
        self, root: Path, cpus: str | None, numa: str | None, nodes: tuple[int, ...] | None
    ) -> None:
        directory(root, "pci0000:00/0000:00:02.0", cpus=cpus, numa=numa)
        assert Host(root).topology_of("/sys/devices/pci0000:00/0000:00:02.0") == nodes

    def test_an_invalid_numa_node_is_reported(self, root: Path) -> None:
        directory(root, "a", cpus="0", numa="-1,0")
        host = Host(root)
        assert host.topology_of("/sys/devices/a") is None
        assert host.notes == ["NUMA node of /sys/devices/a unknown: numa_node is '-1,0', expected numbers from 0"]

    @pytest.mark.parametrize("name", ["numa_node", "local_cpulist"])
    def test_an_unreadable_numa_node_is_reported(self, root: Path, name: str) -> None:
        path = directory(root, "a", cpus="0", numa="0")
        (path / name).unlink()
        (path / name).mkdir()
        host = Host(root)
        assert host.topology_of("/sys/devices/a") is None
        assert host.notes == [f"NUMA node of /sys/devices/a unknown: /sys/devices/a/{name}: Is a directory"]

    @given(NUMA_TEXTS)
    def test_any_attribute_content_is_parsed_or_unknown(self, tmp_path: Path, text: str) -> None:
        write(tmp_path / "sys/devices/a/numa_node", text)
        host = Host(tmp_path)
        nodes = host.topology_of("/sys/devices/a")
        assert nodes is None or (nodes == tuple(sorted(set(nodes))) and all(0 <= node < 2**31 for node in nodes))


class TestSocketInPlaceOfANode:
    """Firmware without local CPUs reports a socket number; the parents may have the NUMA node."""

    def test_a_socket_number_is_replaced_by_the_numa_node_of_the_parent(self, root: Path) -> None:
        directory(root, "parent", cpus="8-15", numa="1")
        directory(root, "parent/child", cpus="", numa="0")
        assert Host(root).topology_of("/sys/devices/parent/child") == (1,)

    def test_a_number_stays_a_numa_node_if_the_parent_has_only_cpus(self, root: Path) -> None:
        directory(root, "parent", cpus="8-15")
        directory(root, "parent/child", cpus="", numa="3")
        assert Host(root).topology_of("/sys/devices/parent/child") == (3,)

    @pytest.mark.parametrize("parent", [{}, {"numa": "-1"}, {"numa": "1", "cpus": ""}])
    def test_no_information_is_no_numa_node(self, root: Path, parent: dict[str, str]) -> None:
        directory(root, "parent", **parent)
        directory(root, "parent/child", cpus="", numa="0")
        assert Host(root).topology_of("/sys/devices/parent/child") is None

    def test_a_socket_number_ends_the_walk(self, root: Path) -> None:
        directory(root, "parent", cpus="", numa="5")
        directory(root, "parent/child/grandchild")
        directory(root, "parent/child", cpus="", numa="0")
        assert Host(root).topology_of("/sys/devices/parent/child/grandchild") is None

    def test_a_cyclic_path_has_no_numa_node(self, root: Path) -> None:
        directory(root, "parent/child", cpus="", numa="0")
        link(root / "sys/devices/parent/slaves/x", "/sys/devices/parent/child")
        assert Host(root).topology_of("/sys/devices/parent/child") is None


class TestWalk:
    def test_the_walk_ends_at_the_first_directory_with_a_numa_node(self, root: Path) -> None:
        directory(root, "pci0000:00", cpus="0", numa="7")
        directory(root, "pci0000:00/0000:00:02.0", cpus="0-3", numa="1")
        directory(root, "pci0000:00/0000:00:02.0/drm/card0")
        assert Host(root).topology_of("/sys/devices/pci0000:00/0000:00:02.0/drm/card0") == (1,)

    def test_the_walk_ends_at_cpus_without_a_numa_node(self, root: Path) -> None:
        directory(root, "top", cpus="0", numa="7")
        directory(root, "top/middle", cpus="0-3", numa="-1")
        directory(root, "top/middle/leaf")
        assert Host(root).topology_of("/sys/devices/top/middle/leaf") is None

    def test_the_walk_starts_at_the_target_of_the_link(self, root: Path) -> None:
        link(root / "sys/class/drm/card0", directory(root, "a/drm/card0"))
        directory(root, "a", cpus="0", numa="4")
        assert Host(root).topology_of("/sys/class/drm/card0") == (4,)

    def test_the_walk_does_not_leave_sys_devices(self, root: Path) -> None:
        write(root / "sys/numa_node", "9")
        write(root / "sys/devices/numa_node", "9")
        directory(root, "a/b")
        write(root / "elsewhere/numa_node", "9")
        (root / "elsewhere/a").mkdir()
        host = Host(root)
        assert host.topology_of("/sys/devices/a/b") is None
        assert host.topology_of("/elsewhere/a") is None
        assert host.notes == []

    def test_missing_paths_are_reported(self, root: Path) -> None:
        host = Host(root)
        assert host.topology_of("/sys/devices/none") is None
        assert host.notes == ["NUMA node of /sys/devices/none unknown: /sys/devices/none: does not exist"]


class TestDevicesThatStandForOthers:
    def test_numa_nodes_of_slaves_are_used(self, root: Path) -> None:
        for number in (0, 1):
            directory(root, f"disk{number}", cpus="0", numa=str(number))
            link(root / f"sys/devices/virtual/block/dm-0/slaves/sd{number}", directory(root, f"disk{number}/block/sd"))
        assert Host(root).topology_of("/sys/devices/virtual/block/dm-0") == (0, 1)

    def test_numa_nodes_of_nested_slaves_are_used(self, root: Path) -> None:
        link(root / "sys/devices/virtual/dm-1/slaves/dm-0", "/sys/devices/virtual/dm-0")
        link(root / "sys/devices/virtual/dm-0/slaves/sda", directory(root, "sda", cpus="0", numa="6"))
        assert Host(root).topology_of("/sys/devices/virtual/dm-1") == (6,)

    def test_other_slaves_are_used_beside_a_dangling_link(self, root: Path) -> None:
        link(root / "sys/devices/dm-0/slaves/gone", "/sys/devices/gone")
        link(root / "sys/devices/dm-0/slaves/sda", directory(root, "sda", cpus="0", numa="6"))
        assert Host(root).topology_of("/sys/devices/dm-0") == (6,)

    def test_names_may_have_pattern_characters(self, root: Path) -> None:
        link(root / "sys/devices/[ab]/slaves/sda", directory(root, "sda", cpus="0", numa="1"))
        link(root / "sys/devices/a/slaves/sdb", directory(root, "sdb", cpus="0", numa="2"))
        assert Host(root).topology_of("/sys/devices/[ab]") == (1,)

    def test_a_vfio_group_has_the_numa_nodes_of_its_functions(self, root: Path) -> None:
        directory(root, "virtual/vfio/42")
        for number, numa in enumerate(("0", "1")):
            function = directory(root, f"pci0000:00/0000:00:0{number}.0", cpus="0", numa=numa)
            link(root / f"sys/kernel/iommu_groups/42/devices/{function.name}", function)
        host = Host(root)
        assert host.topology_of("/sys/devices/virtual/vfio/42") == (0, 1)
        assert host.notes == []

    @pytest.mark.parametrize("path", ["virtual/vfio/43", "virtual/misc/vfio", "virtual/vfio"])
    def test_the_vfio_control_node_and_empty_groups_have_no_numa_nodes(self, root: Path, path: str) -> None:
        directory(root, path)
        host = Host(root)
        assert host.topology_of(f"/sys/devices/{path}") is None
        assert host.notes == []

    def test_cyclic_slaves_end_the_walk(self, root: Path) -> None:
        """Two links at each level: visiting both each time would take exponential time."""
        for one, other in (("a", "b"), ("b", "a")):
            directory(root, one, cpus="", numa="0")
            for name in ("x", "y", "z"):
                link(root / f"sys/devices/{one}/slaves/{name}", f"/sys/devices/{other}")
        directory(root, "c", cpus="0", numa="3")
        link(root / "sys/devices/b/slaves/c", "/sys/devices/c")
        assert Host(root).topology_of("/sys/devices/a") == (3,)


class TestFiles:
    @pytest.fixture
    def card(self, root: Path) -> Path:
        link(root / "sys/class/drm/card0", directory(root, "pci/0000:00:02.0/drm/card0"))
        directory(root, "pci/0000:00:02.0", cpus="0", numa="1")
        return write(root / "dev/dri/card0", "")

    @needs_root
    @pytest.mark.parametrize(("mode", "kind"), [(CHAR, "char"), (BLOCK, "block")])
    def test_device_nodes_are_found_by_their_numbers(self, root: Path, card: Path, mode: int, kind: str) -> None:
        os.mknod(root / "dev/device", mode, os.makedev(226, 7))
        link(root / f"sys/dev/{kind}/226:7", "../../devices/pci/0000:00:02.0/drm/card0")
        link(root / "dev/by-path/pci-x", "../device")
        host = Host(root)
        assert host.topology_of_nodes(["/dev/device"]) == (1,)
        assert host.topology_of_nodes(["/dev/by-path/pci-x"]) == (1,)

    @needs_root
    def test_device_numbers_missing_in_sysfs_are_reported(self, root: Path) -> None:
        write(root / "dev/x", "").unlink()
        os.mknod(root / "dev/x", CHAR, os.makedev(226, 7))
        host = Host(root)
        assert host.topology_of_nodes(["/dev/x"]) is None
        assert host.notes == ["NUMA node of /dev/x unknown: /sys/dev/char/226:7: no such link for /dev/x"]

    @needs_root
    def test_virtual_devices_are_reported(self, root: Path) -> None:
        (root / "dev").mkdir()
        os.mknod(root / "dev/x", CHAR, os.makedev(0, 7))
        host = Host(root)
        assert host.topology_of_nodes(["/dev/x"]) is None
        assert host.notes == ["NUMA node of /dev/x unknown: /dev/x: a virtual device node"]

    def test_plain_files_of_devices_are_found_by_their_names(self, root: Path, card: Path) -> None:
        link(root / "dev/dri/by-path/pci-0000:00:02.0-card", "../card0")
        host = Host(root)
        assert host.topology_of_nodes(["/dev/dri/card0"]) == (1,)
        assert host.notes == []

    @pytest.mark.parametrize("name", ["other", "card*", "card?", "[c]ard0"])
    def test_names_of_no_class_are_reported(self, root: Path, card: Path, name: str) -> None:
        write(root / "dev/dri" / name, "")
        host = Host(root)
        assert host.topology_of_nodes([f"/dev/dri/{name}"]) is None
        assert len(host.notes) == 1

    def test_a_failing_log_file_does_not_affect_the_others(self, root: Path, card: Path) -> None:
        host = Host(root)
        assert host.topology_of_nodes(["/dev/none", "/dev/dri/card0", ""]) == (1,)
        assert [note.partition(" unknown")[0] for note in host.notes] == ["NUMA node of /dev/none", "NUMA node of "]

    def test_plain_files_have_no_numa_node(self, root: Path) -> None:
        assert Host(root).topology_of_nodes([]) is None

    def test_device_nodes_of_this_machine_are_found_in_its_sysfs(self) -> None:
        host = Host()
        assert host.topology_of_nodes(["/dev/null"]) is None
        assert host.notes == []
        assert host.topology_of_nodes(["/proc/self"]) is None
        assert host.notes == ["NUMA node of /proc/self unknown: /proc/self: a virtual device node"]
