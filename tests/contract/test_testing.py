"""`accelplane.testing`: trees that hosts read like those of the kernel, and a kubelet with an agent."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accelplane.devices import Allocation, Attribute, Device, DeviceNode, Verdict
from accelplane.host import Host
from accelplane.host.drivers import vfio_group
from accelplane.plugins import Config, Plugin, ScanResult
from accelplane.plugins.base import Watch
from accelplane.testing import Tree, node

RESOURCE = "tpu.example.com/tpu"


class Tpus(Plugin[Config]):
    namespace = "tpu.example.com"

    def scan(self, host: Host) -> ScanResult:
        for card in host.class_devices("tpu"):
            yield Device(resource="tpu", id=card.name, nodes=[DeviceNode(f"/dev/{card.name}")])

    def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        texts = {each.unit: host.text_or_empty(f"/sys/class/tpu/{each.unit}/state") for each in devices}
        return {unit: Verdict("bad" if text else "good", text) for unit, text in texts.items()}


class Careless(Tpus):
    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Any:
        return Allocation(envs={"COUNT": len(devices)})  # type: ignore[dict-item]

    def labels(self, devices: object) -> Any:
        return ["a"]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_pci_function_is_found_with_its_driver_group_and_numa_node(tree: Tree) -> None:
    path = tree.pci(
        "0000:3a:00.1", vendor="0x1ae0", device="0x0056", driver="vfio-pci", numa=1, iommu_group=7,
        attributes={"sriov_numvfs": "0"},
    )  # fmt: skip
    host = tree.host
    (function,) = host.pci_devices("0x1ae0")
    assert (function.address, host.resolve(function.path)) == ("0000:3a:00.1", path)
    assert (host.driver(path), host.topology_of(path), host.vf_count(path)) == ("vfio-pci", (1,), "0")
    assert vfio_group(host, "0000:3a:00.1") == "7"
    assert host.names("/sys/kernel/iommu_groups/7/devices") == ["0000:3a:00.1"]


def test_a_class_device_belongs_to_the_function_of_its_parent(tree: Tree) -> None:
    function = tree.pci("0000:05:00.0", vendor="0x1ae0", device="0x0056", numa=1)
    tree.class_device("tpu", "tpu0", parent=function)
    tree.class_device("tpu", "tpu1", node=None)
    host = tree.host
    assert [card.name for card in host.class_devices("tpu")] == ["tpu0", "tpu1"]
    assert host.topology_of_nodes(["/dev/tpu0"]) == (1,)
    assert host.function_of("/sys/class/tpu/tpu0") == function
    assert not host.exists("/dev/tpu1")


def test_a_usb_device_has_its_attributes_and_a_node(tree: Tree) -> None:
    first = tree.usb("1-2", vendor="2341", product="0043", serial="A1", numa=1)
    tree.usb("1-3", vendor="2341", product="0043", numa=1)
    tree.class_device("tty", "ttyACM0", parent=first)
    host = tree.host
    assert [device.name for device in host.class_devices("usb", bus=True)] == ["1-2", "1-3"]
    texts = [host.text(f"/sys/bus/usb/devices/1-2/{name}") for name in ("idVendor", "idProduct", "serial", "devnum")]
    assert texts == ["2341", "0043", "A1", "1"]
    assert host.names("/dev/bus/usb/001") == ["001", "002"]
    assert host.topology_of_nodes(["/dev/ttyACM0"]) == (1,)


def test_paths_are_those_of_the_host(tree: Tree) -> None:
    with pytest.raises(ValueError, match=r"^dev/tpu0: found a relative path, expected an absolute one of the host$"):
        tree.node("dev/tpu0")


async def test_devices_are_listed_allocated_and_unhealthy(tree: Tree) -> None:
    tree.class_device("tpu", "tpu0", attributes={"state": ""})
    async with node(Tpus(), tree) as kubelet:
        await kubelet.wait_for(RESOURCE, {"tpu0": "Healthy"})
        container = await kubelet.allocate(RESOURCE)
        assert container.devices == (DeviceNode("/dev/tpu0"),)
        tree.class_device("tpu", "tpu1")
        await kubelet.wait_for(RESOURCE, {"tpu0": "Healthy", "tpu1": "Healthy"})
        tree.write("/sys/class/tpu/tpu0/state", "hot")
        await kubelet.wait_for(RESOURCE, {"tpu0": "Unhealthy", "tpu1": "Healthy"})
        assert kubelet.problems == []


async def test_problems_of_hooks_are_reported(tree: Tree, tmp_path: Path) -> None:
    tree.class_device("tpu", "tpu0")
    async with node(Careless(), tree, nfd_dir=str(tmp_path)) as kubelet:
        await kubelet.wait_for(RESOURCE, {"tpu0": "Healthy"})
        with pytest.raises(Exception, match="post_allocate: envs has 'COUNT': 1, expected texts"):
            await kubelet.allocate(RESOURCE)
        assert kubelet.problems == ["labels: not written: found ['a'], expected a mapping of labels"]


async def test_a_plugin_that_the_agent_cannot_run_is_an_error(tree: Tree) -> None:
    class WithoutWatch(Tpus):
        watch: Watch = ("tpu",)  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"^watch of the plugin is \('tpu',\), expected a Watch$"):
        async with node(WithoutWatch(), tree):
            pass


class CountingTpus(Tpus):
    attribute_defaults: ClassVar[Mapping[str, Attribute]] = {"cores": 0}
    capacity_defaults: ClassVar[Mapping[str, int]] = {"memory": 0}


async def test_a_pod_claims_a_device_and_an_unhealthy_one_has_a_taint(tree: Tree) -> None:
    for name in ("tpu0", "tpu1"):
        tree.class_device("tpu", name)
    tree.write("/sys/class/tpu/tpu1/state", "hot")
    async with node(CountingTpus(), tree, dra=True) as kubelet:
        devices = await kubelet.published(2)
        assert {name: each.taints for name, each in devices.items()} == {"tpu0": [], "tpu1": ["tpu.example.com/health"]}
        assert devices["tpu0"].attributes["cores"] == 0
        assert devices["tpu0"].capacities == {"shares": "1", "memory": "0"}
        container = await kubelet.claim("tpu0")
        assert container.devices == [DeviceNode("/dev/tpu0")]
        assert kubelet.agent.status().dra["plugin"].units["tpu0"].claims == ("default/pod-0",)
        for name in ("tpu0", "tpu1"):
            with pytest.raises(LookupError, match=f"{name} is not free"):
                await kubelet.claim(name)
        kubelet.delete_pod(container.pod)
        assert (await kubelet.claim("tpu0")).devices == [DeviceNode("/dev/tpu0")]


async def test_claims_need_the_option(tree: Tree) -> None:
    async with node(Tpus(), tree) as kubelet:
        with pytest.raises(TypeError, match="dra=True"):
            await kubelet.claim()
