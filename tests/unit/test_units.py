"""Units: the description of hardware that metrics and `inspect` have in common."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memorydirectory
import pytest
from trees import link, write

from accelplane.devices import Device, DeviceNode, Skipped, Unit, UnitNode, Version, plain
from accelplane.host import Host
from accelplane.node.hook_results import checked_devices
from accelplane.node.scan_loop import scan
from accelplane.node.units import complete, units_of
from accelplane.plugins import Plugin
from accelplane.plugins.dlb import DlbPlugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.idxd import DsaConfig, DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.readings import DevicePlan
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, QueueSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedNode

FUNCTION = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
STANDARD = "resource.kubernetes.io/"
# The devices of both nodes are the same, but the kernel has given them other numbers.
NODES = [
    NodeSpec(
        gpus=[GpuSpec(bdf="0000:03:00.0"), GpuSpec(driver="xe", bdf="0000:04:00.0")],
        npus=[NpuSpec(bdf="0000:00:0b.0")],
        qats=[QatSpec(bdf="0000:6b:00.0", vfs=2)],
        dsas=[DsaSpec(bdf="0000:6a:01.0", queues=[QueueSpec(), QueueSpec(mode="shared")])],
        iaas=[IaaSpec(index=1, bdf="0000:6a:02.0", queues=[QueueSpec()])],
        dlbs=[DlbSpec(bdf="0000:72:00.0")],
        fpgas=[FpgaSpec(bdf="0000:81:00.0")],
    ),
    NodeSpec(
        gpus=[GpuSpec(driver="xe", bdf="0000:04:00.0"), GpuSpec(bdf="0000:03:00.0")],
        npus=[NpuSpec(bdf="0000:00:0b.0")],
        qats=[QatSpec(bdf="0000:6b:00.0", vfs=2)],
        dsas=[DsaSpec(index=2, bdf="0000:6a:01.0", queues=[QueueSpec(), QueueSpec(mode="shared")])],
        iaas=[IaaSpec(index=3, bdf="0000:6a:02.0", queues=[QueueSpec()])],
        dlbs=[DlbSpec(bdf="0000:72:00.0")],
        fpgas=[FpgaSpec(bdf="0000:81:00.0")],
    ),
]


@pytest.fixture(scope="module")
def roots() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        roots = [Path(path, str(number)) for number in range(len(NODES))]
        for root, node in zip(roots, NODES, strict=True):
            SimulatedNode(root).build(node)
        yield roots


def units(plugin: Plugin[Any], root: Path) -> list[Unit]:
    host = Host(root)
    return units_of(host, scan(plugin, host))


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (GpuPlugin(GpuConfig(shared_dev_num=2, enable_monitoring=True)),
         {"0000:03:00.0": ("", "Data Center GPU Flex 170"), "0000:04:00.0": ("", "Battlemage G21 [Arc B580]")}),
        (NpuPlugin(), {"0000:00:0b.0": ("", "Core Ultra 200V (Lunar Lake)")}),
        (QatPlugin(),
         {f"0000:6b:00.{number}": ("0000:6b:00.0", "4xxx Series QAT Virtual Function") for number in (1, 2)}),
        (DsaPlugin(DsaConfig(shared_dev_num=3)),
         {f"0000:6a:01.0-wq{number}": ("0000:6a:01.0", "Data Streaming Accelerator (DSA)") for number in (0, 1)}),
        (IaaPlugin(), {"0000:6a:02.0-wq0": ("0000:6a:02.0", "In-Memory Analytics Accelerator (IAA)")}),
        (DlbPlugin(), {"0000:72:00.0": ("", "Dynamic Load Balancer 2.0 (DLB)")}),
        (FpgaPlugin(), {"0000:81:00.0-port0": ("0000:81:00.0", "PAC with Intel Arria 10 GX FPGA")}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plugin) else "",
)  # fmt: skip
def test_units_have_parent_model_and_an_id_without_numbers_of_the_kernel(
    roots: list[Path], plugin: Plugin[Any], expected: dict[str, tuple[str, str]]
) -> None:
    for root in roots:
        found = units(plugin, root)
        assert {unit.id: (unit.parent, unit.text("model")) for unit in found} == expected
        for unit in found:
            address = unit.id.partition("-")[0]
            assert unit.attributes[f"{STANDARD}pciBusID"] == unit.attributes["pciAddress"] == address
            assert unit.attributes[f"{STANDARD}numaNode"] == 0
            assert unit.text(f"{STANDARD}pcieRoot").startswith("pci0000:")
            assert unit.text("driver")


def test_all_shares_of_a_device_are_one_unit_and_monitoring_is_none(roots: list[Path]) -> None:
    found = units(GpuPlugin(GpuConfig(shared_dev_num=2, enable_monitoring=True)), roots[0])
    assert [(unit.health, unit.ids) for unit in found] == [
        ("card0", {"i915": ["card0-0", "card0-1"]}),
        ("card1", {"xe": ["card1-0", "card1-1"]}),
    ]


class TestOtherPlugins:
    """Devices of a plugin that says nothing but resource, ID and nodes."""

    def tree(self, root: Path, names: tuple[str, ...] = ("tpu0",)) -> Host:
        files = {"vendor": "0x1234", "device": "0x5678", "numa_node": "1", "local_cpulist": "0-3"}
        for name, text in files.items():
            write(root / FUNCTION[1:] / name, f"{text}\n")
        link(root / FUNCTION[1:] / "driver", root / "sys/bus/pci/drivers/tpu")
        for name in names:
            (root / FUNCTION[1:] / "accel" / name).mkdir(parents=True)
            link(root / "sys/class/accel" / name, root / FUNCTION[1:] / "accel" / name)
            write(root / "dev/accel" / name, "")
        return Host(root)

    def device(self, name: str = "tpu0", **fields: Any) -> Device:
        return Device(resource="tpu", id=name, nodes=[DeviceNode(f"/dev/accel/{name}")], **{"topology": (1,), **fields})

    def test_the_function_of_the_nodes_describes_a_device(self, tmp_path: Path) -> None:
        [unit] = units_of(self.tree(tmp_path), [self.device()])
        assert (unit.id, unit.parent, unit.health, unit.ids) == ("0000:3b:00.0", "", "tpu0", {"tpu": ["tpu0"]})
        assert plain(unit.attributes) == {
            "driver": "tpu",
            "model": "",
            "pciAddress": "0000:3b:00.0",
            "pciId": "0x5678",
            f"{STANDARD}numaNode": 1,
            f"{STANDARD}pciBusID": "0000:3b:00.0",
            f"{STANDARD}pcieRoot": "pci0000:3a",
        }

    def test_attributes_of_the_plugin_keep_their_types_and_have_names_of_dra(self, tmp_path: Path) -> None:
        given = {"firmware-version": Version("1.2.3"), "ecc": True, "tiles": 2, "product": "TPU v5", "no.name!": "x"}
        [unit] = units_of(self.tree(tmp_path), [self.device(attributes=given, capacities={"memory": 1 << 34})])
        assert unit.attributes["firmwareVersion"] == Version("1.2.3")
        assert plain(unit.attributes)["firmwareVersion"] == "1.2.3"
        assert (unit.attributes["ecc"], unit.attributes["tiles"], unit.text("model")) == (True, 2, "TPU v5")
        assert unit.capacities == {"memory": 1 << 34}

    def test_a_path_may_be_below_a_prefix(self, tmp_path: Path) -> None:
        host = Host(tmp_path)
        self.tree(tmp_path / "host")
        [unit] = units_of(host, [self.device(path=f"/host{FUNCTION}")])
        assert (unit.id, unit.attributes[f"{STANDARD}pcieRoot"]) == ("0000:3b:00.0", "pci0000:3a")

    def test_units_of_one_function_have_different_ids(self, tmp_path: Path) -> None:
        host = self.tree(tmp_path, ("tpu0", "tpu1"))
        found = units_of(host, [self.device(), self.device("tpu1", part="core1")])
        assert [(unit.id, unit.parent) for unit in found] == [
            ("0000:3b:00.0-tpu0", "0000:3b:00.0"),
            ("0000:3b:00.0-core1", "0000:3b:00.0"),
        ]

    def test_a_device_with_nodes_of_several_functions_is_no_unit(self, tmp_path: Path) -> None:
        host = self.tree(tmp_path)
        other = tmp_path / "sys/devices/pci0000:3a/0000:3c:00.0/accel/tpu1"
        other.mkdir(parents=True)
        link(tmp_path / "sys/class/accel/tpu1", other)
        write(tmp_path / "dev/accel/tpu1", "")
        nodes = [DeviceNode("/dev/accel/tpu0"), DeviceNode("/dev/accel/tpu1")]
        assert units_of(host, [Device(resource="tpu", id="all", nodes=nodes, topology=None)]) == []

    def test_a_device_without_a_function_is_a_unit_with_its_own_name(self, tmp_path: Path) -> None:
        write(tmp_path / "dev/sgx_enclave", "")
        device = Device(resource="enclave", id="sgx-enclave", nodes=[DeviceNode("/dev/sgx_enclave")], topology=None)
        [unit] = units_of(Host(tmp_path), device.shared(2))
        assert (unit.id, unit.parent, unit.attributes) == ("sgx-enclave", "", {})
        assert unit.ids == {"enclave": ["sgx-enclave-0", "sgx-enclave-1"]}

    @pytest.mark.parametrize("path", ["", "/sys/class/accel/tpu0", FUNCTION])
    def test_a_plan_without_facts_gets_those_of_the_unit_and_keeps_its_own(self, tmp_path: Path, path: str) -> None:
        host = self.tree(tmp_path)
        plan = DevicePlan(device="tpu0", units=("tpu0",), path=path, facts={"model": "TPU v5"})
        [completed] = complete(host, [plan], [self.device()])
        assert completed.bdf == "0000:3b:00.0"
        assert completed.facts == {
            "driver": "tpu", "model": "TPU v5", "pci_id": "0x5678", "kind": "", "function": "", "numa_node": "1",
        }  # fmt: skip


def test_nodes_have_the_type_and_the_numbers_of_the_machine() -> None:
    device = Device(resource="null", id="null", nodes=[DeviceNode("/dev/null"), DeviceNode("/dev/absent", "", "r")])
    status = os.stat("/dev/null")
    assert stat.S_ISCHR(status.st_mode)
    [unit] = units_of(Host(), [device])
    assert unit.nodes == [
        UnitNode("/dev/null", "c", os.major(status.st_rdev), os.minor(status.st_rdev), "rw"),
        UnitNode("/dev/absent", permissions="r"),
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"path": 1}, "path is 1, expected a directory of sysfs"),
        ({"part": None}, "part is None, expected a text"),
        ({"attributes": {"clock": 1.5}}, "attribute 'clock' is 1.5, expected a text, number, bool or Version"),
        ({"attributes": {1: "x"}}, "attribute 1 is 'x'"),
        ({"capacities": {"memory": -1}}, "capacity 'memory' is -1, expected a number from 0"),
        ({"capacities": {"memory": "16Gi"}}, "capacity 'memory' is '16Gi'"),
    ],
)
def test_invalid_descriptions_are_skipped_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    [skipped] = checked_devices("example.com", [Device(resource="r", id="1", **fields)])
    assert isinstance(skipped, Skipped)
    assert skipped.reason.startswith(reason)
