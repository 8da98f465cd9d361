"""A file of one device that blocks affects this device only, whatever family it is of. In virtual time.

SGX is no family of several devices.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import fpgatrees
import pytest
import trees_qat
from msgspec.structs import replace
from scripted import Setup
from trees import gpu_card, link, npu, write

from accelplane.devices import Device, DeviceNode
from accelplane.host import Host
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.dlb import DlbPlugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.idxd import DsaConfig, DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.qat import QatPlugin


class Tpu(Plugin[Config]):
    """A family of a third party. It finds its devices in a directory, and handles no errors."""

    namespace = "tpu.example.com"

    def scan(self, host: Host) -> Iterator[Device]:
        for name in host.optional_names("/sys/class/tpu"):
            assert host.text(f"/sys/class/tpu/{name}/state") == "up"
            yield Device(resource="chip", id=name, nodes=[DeviceNode(f"/dev/{name}")], topology=None)


class FixedTpu(Tpu):
    """The same with the paths of its devices in the program."""

    def scan(self, host: Host) -> Iterator[Device]:
        for name in ("tpu2", "tpu0", "tpu1"):
            if host.exists(f"/dev/{name}"):
                assert host.text(f"/sys/class/tpu/{name}/state") == "up"
                yield Device(resource="chip", id=name, nodes=[DeviceNode(f"/dev/{name}")], topology=None)


def tpu(root: Path, index: int) -> None:
    device = root / f"sys/devices/virtual/tpu/tpu{index}"
    write(device / "state", "up\n")
    link(root / f"sys/class/tpu/tpu{index}", device)
    write(root / f"dev/tpu{index}", "")


def dlb(root: Path, index: int) -> None:
    function = root / f"sys/devices/pci0000:00/0000:0{index + 6}:00.0"
    write(function / "sriov_numvfs", "0\n")
    link(function / f"dlb2/dlb{index}/device", function)
    link(root / f"sys/class/dlb2/dlb{index}", function / f"dlb2/dlb{index}")
    write(root / f"dev/dlb{index}", "")


def queue(root: Path, index: int, family: str = "dsa") -> None:
    function = root / f"sys/devices/pci0000:6a/0000:6{index}:01.0"
    directory = function / f"{family}{index}" / f"wq{index}.0"
    for attribute, text in (("state", "enabled"), ("type", "user"), ("mode", "dedicated")):
        write(directory / attribute, f"{text}\n")
    write(root / "dev" / family / directory.name, "")
    link(root / "sys/bus/dsa/devices" / directory.parent.name, directory.parent)


def iaa(root: Path, index: int) -> None:
    queue(root, index, "iax")


def dsa_function(root: Path, index: int) -> None:
    address = f"0000:6{index}:01.0"
    function = root / "sys/devices/pci0000:6a" / address
    for attribute, text in (("vendor", "0x8086"), ("device", "0x0b25"), ("class", "0x088000")):
        write(function / attribute, f"{text}\n")
    link(function / "driver", root / "sys/bus/pci/drivers/vfio-pci")
    link(function / "iommu_group", root / f"sys/kernel/iommu_groups/{index}")
    link(root / "sys/bus/pci/devices" / address, function)


def qat(root: Path, index: int) -> None:
    trees_qat.pf(root, f"0000:6{index}:00.0", vfs=(0,))


def fpga(root: Path, index: int, family: str = "dfl") -> None:
    card = fpgatrees.Card(root, family, f"0000:8{index}:00.0")
    fpgatrees.function(card)
    fpgatrees.class_device(card, index)
    fpgatrees.fme(card, index, number=index)
    fpgatrees.port(card, index, number=index)


def opae(root: Path, index: int) -> None:
    fpga(root, index, "opae")


class Family(NamedTuple):
    """`build` adds a device to a tree; `blocks` is a name in the paths of all files of the device with the index 0."""

    plugin: Callable[[], Plugin[Any]]
    build: Callable[[Path, int], object]
    blocks: str


FAMILIES = {
    "gpu": Family(GpuPlugin, gpu_card, "card0"),
    "npu": Family(NpuPlugin, npu, "accel0"),
    "qat": Family(QatPlugin, qat, "0000:60:00.0"),
    "dsa": Family(DsaPlugin, queue, "dsa0"),
    "dsa-vfio": Family(lambda: DsaPlugin(DsaConfig(driver="vfio-pci")), dsa_function, "0000:60:01.0"),
    "iaa": Family(IaaPlugin, iaa, "iax0"),
    "dlb": Family(DlbPlugin, dlb, "dlb0"),
    "fpga-dfl": Family(FpgaPlugin, fpga, "region0"),
    "fpga-opae": Family(FpgaPlugin, opae, "intel-fpga-dev.0"),
    "third party": Family(Tpu, tpu, "tpu0"),
}


def devices(setup: Setup) -> tuple[int, int]:
    """All devices at the kubelet, and the healthy ones."""
    listed = [good for name in setup.kubelet.lists for good in setup.kubelet.list_at_rest(name).values()]
    return len(listed), sum(listed)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with closing(Setup()) as instance:
        shutil.rmtree(instance.root / "sys")  # the trees of some families have no directory of all PCI functions
        # With shorter intervals a thread watches healthy devices of QAT, and waits in real time.
        instance.settings = replace(instance.settings, health_interval=60.0)
        yield instance


@pytest.mark.parametrize("name", FAMILIES)
def test_one_device_of_a_family_blocks_while_others_are_plugged_and_unplugged(setup: Setup, name: str) -> None:
    family = FAMILIES[name]
    for index in range(2):
        family.build(setup.root, index)
    setup.enabled = {"family": family.plugin()}
    setup.reload()
    setup.complete_work()
    assert devices(setup) == (2, 2)
    setup.threads.blocks.add(family.blocks)
    setup.complete_work()
    assert devices(setup) == (2, 1)
    family.build(setup.root, 2)
    setup.complete_work()
    assert devices(setup) == (3, 2)
    assert not setup.agent.runners["family"].scan.failing
    setup.threads.unblock(family.blocks)
    setup.complete_work()
    assert devices(setup) == (3, 3)


def test_a_plugin_with_fixed_paths_that_handles_no_errors_is_isolated_by_device(setup: Setup) -> None:
    """Devices after the one that blocks keep their facts until they are removed; the earlier ones are scanned."""
    for index in (0, 1):
        tpu(setup.root, index)
    setup.enabled = {"family": FixedTpu()}
    setup.reload()
    setup.complete_work()
    setup.threads.blocks.add("tpu0")
    setup.complete_work()
    assert setup.kubelet.lists["tpu.example.com/chip"] == {"tpu0": False, "tpu1": True}
    tpu(setup.root, 2)
    setup.complete_work()
    assert setup.kubelet.lists["tpu.example.com/chip"] == {"tpu0": False, "tpu1": True, "tpu2": True}
    (setup.root / "dev/tpu1").unlink()
    setup.complete_work()
    assert setup.kubelet.lists["tpu.example.com/chip"] == {"tpu0": False, "tpu2": True}
    assert not setup.agent.runners["family"].scan.failing
    setup.threads.unblock("tpu0")
    setup.complete_work()
    assert setup.kubelet.lists["tpu.example.com/chip"] == {"tpu0": True, "tpu2": True}
