"""Resources from USB devices, PCI functions behind vfio-pci, and RDMA devices."""

from pathlib import Path

import pytest
from generictrees import CONTROLLER, digest, files, found, plugin, rdma, reasons, usb
from hypothesis import given
from hypothesis import strategies as st
from kernelhost import KernelHost
from trees import link, write

from accelplane.devices import Device, DeviceNode, Skipped, Unit
from accelplane.host import Host
from accelplane.host.drivers import driver_of
from accelplane.node.scan_loop import scan
from accelplane.node.units import units_of
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

VF, OTHER = "0000:61:00.1", "0000:61:00.2"
QAT_VF = {"vendor": "8086", "device": "4941"}
BOUND = {**QAT_VF, "bind": True}


def unit_of(root: Path, *groups: dict[str, object]) -> Unit:
    (unit,) = units_of(Host(root), list(found(root, *groups)))
    return unit


class TestUsb:
    def test_all_matches_of_a_group_are_one_device_as_in_the_original_project(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-2", number=3)
        usb(tmp_path, "1-4", number=11)
        usb(tmp_path, "1-5", "046d:0825", number=7)
        inventory = found(tmp_path, {"usb": [{"vendor": "1A86", "product": "0x7523"}]})
        assert files(inventory) == [["/dev/bus/usb/001/003", "/dev/bus/usb/001/011"]]
        (device,) = inventory
        assert device.id == digest("0/dev/bus/usb/001/003/dev/bus/usb/001/011")
        assert device.nodes[0] == DeviceNode("/dev/bus/usb/001/003", permissions="rw")

    def test_separate_matches_are_devices_named_by_their_ports(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-2", number=3)
        usb(tmp_path, "1-4.1", number=11)
        inventory = found(tmp_path, {"count": 2, "usb": [{"vendor": "1a86", "separate": True}]})
        assert [device.id for device in inventory] == ["1-2-0", "1-2-1", "1-4.1-0", "1-4.1-1"]

    @pytest.mark.parametrize(
        ("spec", "number"),
        [({"serial": "B"}, 2), ({"product": "7523", "serial": "A"}, 1), ({"serial": "C"}, 0), ({"product": "1"}, 0)],
    )
    def test_product_and_serial_number_restrict_the_matches(
        self, tmp_path: Path, spec: dict[str, str], number: int
    ) -> None:
        usb(tmp_path, "1-1", number=1, serial="A")
        usb(tmp_path, "1-2", number=2, serial="B")
        inventory = found(tmp_path, {"usb": [{"vendor": "1a86", **spec}]})
        assert files(inventory) == ([[f"/dev/bus/usb/001/{number:03d}"]] if number else [])

    def test_a_missing_device_is_named(self, tmp_path: Path) -> None:
        inventory = found(tmp_path, {"usb": [{"vendor": "1a86", "product": "7523", "serial": "X"}]})
        assert reasons(inventory) == ["thing: USB 1a86:7523 with the serial number 'X': no such USB device"]

    def test_nodes_of_subsystems_are_those_of_the_device(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-3", "046d:0825", nodes={"video0": "video4linux", "video1": "video4linux", "snd/pcm": "sound"})
        usb(tmp_path, "1-4", "046d:0999", number=6, nodes={"video2": "video4linux"})
        group = {"usb": [{"vendor": "046d", "product": "0825", "subsystems": ["video4linux"]}], "env": {"A": "{path}"}}
        inventory = found(tmp_path, group)
        assert files(inventory) == [["/dev/video0", "/dev/video1"]]
        (device,) = inventory
        assert (device.id, device.envs) == ("1-3", {"A": "/dev/video0"})

    def test_a_hub_has_no_nodes_of_the_devices_behind_it(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-3", "1d6b:0001", number=2)
        usb(tmp_path, "1-3.1", "1d6b:0002", above="usb1/1-3", nodes={"video0": "video4linux"})
        inventory = found(tmp_path, {"usb": [{"vendor": "1d6b", "subsystems": ["video4linux"], "separate": True}]})
        assert [device.id for device in inventory] == ["1-3.1"]
        assert reasons(inventory) == ["1-3: has no device node of video4linux"]

    def test_a_device_without_its_node_is_skipped(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-3")
        (tmp_path / "dev/bus/usb/001/005").unlink()
        inventory = found(tmp_path, {"usb": [{"vendor": "1a86"}]})
        assert reasons(inventory) == ["1-3: /dev/bus/usb/001/005 does not exist"]

    @pytest.mark.parametrize("text", ["", "junk", "../1", "99999"])
    def test_descriptors_that_are_no_numbers_are_no_device(self, tmp_path: Path, text: str) -> None:
        write(usb(tmp_path, "1-3") / "devnum", text)
        assert files(found(tmp_path, {"usb": [{"vendor": "1a86"}]})) == []

    def test_units_have_model_serial_number_and_numa_node(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-3", "046d:0825", serial="S\x1b1", product="HD Webcam\n")
        unit = unit_of(tmp_path, {"usb": [{"vendor": "046d"}]})
        assert unit.id == "0000:00:14.0-usb1-3"
        assert {key: unit.attributes[key] for key in ("model", "serial", "kind", "vendorId", "productId")} == {
            "model": "HD Webcam", "serial": "S1", "kind": "usb", "vendorId": "046d", "productId": "0825",
        }  # fmt: skip

    def test_a_path_has_the_attributes_of_its_usb_device(self, tmp_path: Path) -> None:
        usb(tmp_path, "1-3", serial="A1", nodes={"ttyUSB0": "tty"})
        (device,) = found(tmp_path, {"paths": [{"path": "/dev/ttyUSB0"}], "env": {"SERIAL": "{serial}"}})
        assert device.path == f"/{CONTROLLER}/usb1/1-3/1-3:1.0/tty/ttyUSB0"
        assert (device.part, device.attributes["serial"], device.envs) == ("usb1-3", "A1", {"SERIAL": "A1"})


class TestPci:
    def host(self) -> KernelHost:
        return KernelHost(Kernel(NodeSpec(qats=[QatSpec(bdf="0000:61:00.0", vfs=2)])), [])

    def test_functions_that_are_bound_to_another_driver_are_skipped(self) -> None:
        inventory = scan(plugin({"pci": [QAT_VF]}), self.host())
        problem = "found 4xxxvf bound to it, expected vfio-pci; bind it, or set bind to true"
        assert inventory.skipped == (Skipped(VF, problem, warning=True), Skipped(OTHER, problem, warning=True))

    def test_functions_are_bound_and_published_by_iommu_group(self) -> None:
        host, subject = self.host(), plugin({"pci": [BOUND], "env": {"PCI": "{address}"}})
        subject.prepare(host)
        devices = list(scan(subject, host))
        assert [(device.id, device.envs["PCI"]) for device in devices] == [(VF, VF), (OTHER, OTHER)]
        for device in devices:
            assert device.nodes[1] == DeviceNode("/dev/vfio/vfio")
            assert all(host.kernel.exists(node.host_path) for node in device.nodes)
        assert units_of(host, devices)[0].attributes["pciAddress"] == VF
        writes = len(host.writes)
        subject.prepare(host)
        assert len(host.writes) == writes

    def test_only_functions_at_the_addresses_are_bound(self) -> None:
        host, subject = self.host(), plugin({"pci": [{**BOUND, "addresses": [OTHER]}]})
        subject.prepare(host)
        assert [driver_of(host, address) for address in (VF, OTHER)] == ["4xxxvf", "vfio-pci"]

    def test_a_physical_function_with_virtual_functions_is_not_bound(self) -> None:
        host, subject = self.host(), plugin({"pci": [{"vendor": "8086", "device": "4940", "bind": True}]})
        subject.prepare(host)
        assert host.writes == []
        problem = "not bound to vfio-pci: it has virtual functions; remove them, or select these"
        assert scan(subject, host).skipped == (Skipped("0000:61:00.0", problem, warning=True),)

    def test_functions_without_bind_are_never_written(self) -> None:
        assert not plugin({"pci": [QAT_VF]}).overrides("prepare")

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ({"net/eth0/flags": "0x1003"}, "its network interface eth0 is up; set it down, or set bind to false"),
            ({"net/eth0/flags": "0x1002"}, ""),
            ({"net/": ""}, "its network interface is in another network namespace, maybe of a pod; mount /sys of the"),
            ({"net/eth0/flags": "junk"}, "its network interface eth0 is up"),
            ({"net/eth0/mtu": "1500"}, "its use is unknown: /sys/bus/pci/devices/0000:3b:00.0/net/eth0/flags"),
            ({"nvme/nvme0/nvme0n1/size": "1"}, "it has the disk nvme0n1; set bind to false"),
        ],
    )
    def test_functions_in_use_are_not_bound(self, tmp_path: Path, files: dict[str, str], problem: str) -> None:
        function = self.tree(tmp_path, driver="driver")
        for name, text in files.items():
            if name.endswith("/"):
                (function / name).mkdir()
            else:
                write(function / name, text)
        if "nvme/nvme0/nvme0n1/size" in files:
            link(tmp_path / "sys/class/block/nvme0n1", function / "nvme/nvme0/nvme0n1")
        host, subject = Host(tmp_path), plugin({"pci": [{"vendor": "8086", "device": "1572", "bind": True}]})
        subject.prepare(host)
        (skipped,) = scan(subject, host).skipped
        assert problem in skipped.reason
        assert (function / "driver_override").exists() == (not problem)

    def tree(self, root: Path, *, driver: str = "vfio-pci", other: str = "", other_class: str = "0x020000") -> Path:
        """A function in IOMMU group 7, with another one that is bound to the driver `other`."""
        drivers = root / "sys/bus/pci/drivers"
        for name in filter(None, ("vfio-pci", driver, other)):
            write(drivers / name / "bind", "")
            write(drivers / name / "unbind", "")
        function = root / "sys/devices/pci0000:3a/0000:3b:00.0"
        group = root / "sys/kernel/iommu_groups/7"
        for path, bound, cls in (
            (function, driver, "0x020000"),
            (function.parent / "0000:3b:00.1", other, other_class),
        ):
            ids = {"vendor": "0x8086", "device": "0x1572" if path == function else "0x1573", "class": cls}
            for name, text in ids.items():
                write(path / name, text + "\n")
            if bound:
                link(path / "driver", drivers / bound)
            link(path / "iommu_group", group)
            link(root / "sys/bus/pci/devices" / path.name, path)
            link(group / "devices" / path.name, path)
        write(root / "sys/class/iommu/dmar0", "")
        return function

    def test_what_cannot_be_read_does_not_affect_other_groups(self, tmp_path: Path) -> None:
        write(tmp_path / "sys/bus/pci/devices", "no directory")
        write(tmp_path / "dev/fuse", "")
        subject = plugin({"pci": [BOUND]}, {"paths": [{"path": "/dev/fuse"}]})
        subject.prepare(Host(tmp_path))
        inventory = scan(subject, Host(tmp_path))
        assert files(inventory) == [["/dev/fuse"]]
        assert reasons(inventory) == ["thing: /sys/bus/pci/devices: Not a directory"]

    @pytest.mark.parametrize(
        ("other", "cls", "healthy"),
        [("", "0x020000", True), ("pci-stub", "0x020000", True), ("i40e", "0x020000", False), ("x", "0x060400", True)],
    )
    def test_a_group_with_a_function_of_another_driver_is_unhealthy(
        self, tmp_path: Path, other: str, cls: str, healthy: bool
    ) -> None:
        self.tree(tmp_path, other=other, other_class=cls)
        (device,) = found(tmp_path, {"pci": [{"vendor": "8086", "device": "1572"}]})
        assert device.healthy == healthy
        assert ("0000:3b:00.1 of the same IOMMU group is bound to i40e" in device.reason) != healthy

    def test_functions_of_one_iommu_group_are_one_device(self, tmp_path: Path) -> None:
        self.tree(tmp_path, other="vfio-pci")
        ids = [{"vendor": "8086", "device": device} for device in ("1572", "1573", "1572")]
        (device,) = found(tmp_path, {"pci": ids, "env": {"PCI": "{address}"}})
        assert device.id == "0000:3b:00.0+0000:3b:00.1"
        assert device.nodes == (DeviceNode("/dev/vfio/7"), DeviceNode("/dev/vfio/vfio"))
        assert device.envs == {"PCI": "0000:3b:00.0,0000:3b:00.1"}


class TestRdma:
    def devices(self, root: Path, **spec: object) -> list[Device]:
        return list(found(root, {"rdma": [spec]}))

    def test_a_device_has_its_verbs_node_and_the_one_of_the_connection_manager(self, tmp_path: Path) -> None:
        rdma(tmp_path)
        (device,) = self.devices(tmp_path)
        assert device.id == "mlx5_0"
        assert device.nodes == (DeviceNode("/dev/infiniband/uverbs0"), DeviceNode("/dev/infiniband/rdma_cm"))
        assert device.topology == (1,)

    def test_subnet_management_has_more_nodes(self, tmp_path: Path) -> None:
        rdma(tmp_path)
        (device,) = self.devices(tmp_path, umad=True)
        names = [node.host_path.rpartition("/")[2] for node in device.nodes]
        assert names == ["uverbs0", "issm0", "umad0", "rdma_cm"]

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ({"names": ["mlx5_*"]}, ["mlx5_0", "mlx5_1"]),
            ({"names": ["mlx5_1", "rxe*"]}, ["mlx5_1"]),
            ({"interfaces": ["ens2f0"]}, ["mlx5_1"]),
            ({"linkLayer": "InfiniBand"}, ["mlx5_1"]),
            ({"linkLayer": "Ethernet", "vendor": "15b3", "device": "101D"}, ["mlx5_0"]),
            ({"vendor": "8086"}, []),
        ],
    )
    def test_conditions_select_devices(self, tmp_path: Path, spec: dict[str, object], expected: list[str]) -> None:
        rdma(tmp_path)
        rdma(tmp_path, 1, address="0000:5e:00.0", layer="InfiniBand", interface="ens2f0")
        assert [device.id for device in self.devices(tmp_path, **spec)] == expected

    def test_software_devices_are_found_by_their_interface(self, tmp_path: Path) -> None:
        device = tmp_path / "sys/devices/virtual/infiniband/rxe0"
        write(device / "parent", "eth0\n")
        link(tmp_path / "sys/class/infiniband/rxe0", device)
        verbs = tmp_path / "sys/devices/virtual/infiniband_verbs/uverbs0"
        write(verbs / "ibdev", "rxe0\n")
        link(tmp_path / "sys/class/infiniband_verbs/uverbs0", verbs)
        (found,) = self.devices(tmp_path, interfaces=["eth0"])
        assert (found.id, found.nodes) == ("rxe0", (DeviceNode("/dev/infiniband/uverbs0"),))

    def test_a_device_without_its_verbs_node_is_skipped(self, tmp_path: Path) -> None:
        rdma(tmp_path)
        (tmp_path / "sys/class/infiniband_verbs/uverbs0").unlink()
        inventory = found(tmp_path, {"rdma": [{}]})
        assert reasons(inventory) == ["mlx5_0: has no device node uverbs; load the kernel module ib_uverbs"]

    def test_units_have_the_facts_of_the_adapter(self, tmp_path: Path) -> None:
        rdma(tmp_path)
        unit = unit_of(tmp_path, {"rdma": [{}]})
        expected = {
            "name": "mlx5_0", "interface": "ens1f0", "linkLayer": "Ethernet", "pciAddress": "0000:3b:00.0",
            "pciId": "0x101d", "resource.kubernetes.io/numaNode": 1,
        }  # fmt: skip
        assert {key: unit.attributes[key] for key in expected} == expected


TEXTS = st.sampled_from(("", "1", "junk", "046d", "1a86", "\x00", "9" * 40, "../..", "\u2603", "0x15b3", "0x101d"))
FILES = st.sampled_from(
    (
        "bus/usb/devices/1-1/idVendor",
        "bus/usb/devices/1-1/idProduct",
        "bus/usb/devices/1-1/busnum",
        "bus/usb/devices/1-1/devnum",
        "bus/usb/devices/1-1/serial",
        "bus/usb/devices/1-1:1.0/idVendor",
        "class/tty/ttyACM0/uevent",
        "class/infiniband/mlx5_0/device/vendor",
        "class/infiniband/mlx5_0/ports/1/link_layer",
        "class/infiniband_verbs/uverbs0/ibdev",
        "class/infiniband_mad/umad0",
        "bus/pci/devices/0000:00:01.0/vendor",
        "bus/pci/devices/0000:00:01.0/device",
        "bus/pci/devices/0000:00:01.0/class",
        "bus/pci/devices/junk",
    )
)


@given(tree=st.dictionaries(FILES, TEXTS, max_size=10))
def test_any_sysfs_is_scanned(tree: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("sysfs")
    for name, text in tree.items():
        write(root / "sys" / name, text)
    write(root / "dev/bus/usb/001/001", "")
    subject = plugin(
        {"usb": [{"vendor": "046d"}, {"vendor": "1a86", "separate": True}]},
        {"usb": [{"vendor": "046d", "subsystems": ["tty"]}]},
        {"rdma": [{}]},
        {"rdma": [{"vendor": "15b3", "linkLayer": "Ethernet", "umad": True}]},
        {"pci": [{"vendor": "1a86", "device": "1", "bind": True}]},
    )
    subject.prepare(Host(root))
    inventory = scan(subject, Host(root))
    assert inventory == scan(subject, Host(root))
    assert all(node.host_path.startswith("/dev/") for device in inventory for node in device.nodes)


@pytest.mark.parametrize("name", ["../etc/shadow", "/etc/shadow", "a/../../b", "..", "a b", ""])
def test_names_of_nodes_that_lead_elsewhere_are_no_nodes(tmp_path: Path, name: str) -> None:
    path = usb(tmp_path, "1-3", "046d:0825", nodes={"video0": "video4linux"})
    write(path / "1-3:1.0/video4linux/video0/uevent", f"DEVNAME={name}\n")
    assert files(found(tmp_path, {"usb": [{"vendor": "046d", "subsystems": ["video4linux"]}]})) == []
