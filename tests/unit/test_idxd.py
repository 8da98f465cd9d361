"""The DSA and IAA scans on trees of plain files, and of real device nodes where we may make them."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from trees import link, write

from accelplane.devices import Allocation, Device, DeviceNode, Skipped
from accelplane.host import Host
from accelplane.plugins.base import Plugin
from accelplane.plugins.idxd import DsaConfig, DsaPlugin, IaaConfig, IaaPlugin

pytestmark = pytest.mark.memory

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")


def queue(
    root: Path,
    name: str = "wq0.0",
    *,
    family: str = "dsa",
    state: str = "enabled",
    kind: str = "user",
    mode: str = "dedicated",
    node: bool = True,
    numa: int = 1,
) -> Path:
    """A work queue; returns its directory."""
    device = f"{family}{name[2:].partition('.')[0]}"
    function = root / "sys/devices/pci0000:6a/0000:6a:01.0"
    write(function / "numa_node", f"{numa}\n")
    write(function / "local_cpulist", "0-7\n")
    directory = function / device / name
    for attribute, text in (("state", state), ("type", kind), ("mode", mode)):
        write(directory / attribute, f"{text}\n")
    if not (root / "sys/bus/dsa/devices" / device).is_symlink():
        link(root / "sys/bus/dsa/devices" / device, function / device)
    if node:
        write(root / ("dev/dsa" if family == "dsa" else "dev/iax") / name, "")
    return directory


def function(
    root: Path,
    address: str,
    *,
    device: str = "0x0b25",
    vendor: str = "0x8086",
    driver: str = "vfio-pci",
    group: int = 7,
) -> None:
    """A PCI function of the bus."""
    directory = root / "sys/devices/pci0000:6a" / address
    for attribute, text in (("vendor", vendor), ("device", device), ("class", "0x088000"), ("numa_node", "0")):
        write(directory / attribute, f"{text}\n")
    write(directory / "local_cpulist", "0-7\n")
    link(root / "sys/bus/pci/devices" / address, directory)
    if driver:
        link(directory / "driver", root / "sys/bus/pci/drivers" / driver)
    if group >= 0:
        link(directory / "iommu_group", root / f"sys/kernel/iommu_groups/{group}")


def found(plugin: Plugin[Any], root: Path) -> tuple[list[Device], list[Skipped]]:
    items = list(plugin.scan(Host(root)))
    return (
        [item for item in items if isinstance(item, Device)],
        [item for item in items if isinstance(item, Skipped)],
    )


def test_an_enabled_user_queue_is_published_under_its_type_and_mode(tmp_path: Path) -> None:
    queue(tmp_path)
    assert found(DsaPlugin(), tmp_path) == (
        [
            Device(
                resource="wq-user-dedicated",
                id="wq-user-dedicated-wq0.0-0",
                unit="wq0.0",
                nodes=[DeviceNode("/dev/dsa/wq0.0")],
                topology=(1,),
                attributes={"type": "user", "mode": "dedicated"},
                path="/sys/bus/dsa/devices/dsa0/wq0.0",
                part="wq0",
            )
        ],
        [],
    )


def test_iaa_has_its_own_devices_nodes_and_namespace(tmp_path: Path) -> None:
    queue(tmp_path, "wq1.0", family="iax", mode="shared")
    queue(tmp_path, "wq0.0", family="dsa")
    devices, _ = found(IaaPlugin(IaaConfig(shared_dev_num=10)), tmp_path)
    assert [device.id for device in devices] == [f"wq-user-shared-wq1.0-{number}" for number in range(10)]
    assert {device.nodes for device in devices} == {(DeviceNode("/dev/iax/wq1.0"),)}
    assert IaaPlugin.namespace == "iaa.intel.com"


def test_only_shared_queues_are_shared(tmp_path: Path) -> None:
    queue(tmp_path, "wq0.0")
    queue(tmp_path, "wq0.1", mode="shared")
    devices, _ = found(DsaPlugin(DsaConfig(shared_dev_num=2)), tmp_path)
    assert [device.id for device in devices] == [
        "wq-user-dedicated-wq0.0-0",
        "wq-user-shared-wq0.1-0",
        "wq-user-shared-wq0.1-1",
    ]


@pytest.mark.parametrize("state", ["disabled", "", "enabled2"])
def test_a_queue_that_is_not_enabled_is_not_published(tmp_path: Path, state: str) -> None:
    queue(tmp_path, state=state)
    assert found(DsaPlugin(), tmp_path) == ([], [])


@pytest.mark.parametrize("kind", ["kernel", "none", "mdev"])
def test_queues_of_other_types_have_no_device_nodes_and_are_optional(tmp_path: Path, kind: str) -> None:
    queue(tmp_path, kind=kind, node=False)
    (device,), _ = found(DsaPlugin(), tmp_path)
    assert (device.resource, tuple(device.nodes)) == (f"wq-{kind}-dedicated", ())
    devices, (skipped,) = found(DsaPlugin(DsaConfig(user_queues_only=True)), tmp_path)
    assert (devices, skipped.warning) == ([], False)


def test_a_queue_without_a_node_is_skipped_and_the_others_are_published(tmp_path: Path) -> None:
    queue(tmp_path, "wq0.0", node=False)
    queue(tmp_path, "wq0.1")
    (tmp_path / "sys/devices/pci0000:6a/0000:6a:01.0/dsa0/wq0.1/type").write_text("user\n")
    (queue(tmp_path, "wq0.2") / "mode").unlink()
    devices, skipped = found(DsaPlugin(), tmp_path)
    assert [device.unit for device in devices] == ["wq0.1"]
    assert [(skip.subject, skip.warning) for skip in skipped] == [("wq0.0", True), ("wq0.2", True)]
    assert "/dev/dsa/wq0.0: no such device node" in skipped[0].reason


@root_only
def test_a_character_device_is_published_with_its_link_in_dev_char(tmp_path: Path) -> None:
    queue(tmp_path, node=False)
    node = tmp_path / "dev/dsa/wq0.0"
    node.parent.mkdir(parents=True)
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    _, (skipped,) = found(DsaPlugin(), tmp_path)
    assert skipped.reason.startswith("/dev/char/1:3: ")
    link(tmp_path / "dev/char/1:3", "../null")
    _, (skipped,) = found(DsaPlugin(), tmp_path)
    assert skipped.reason == "/dev/char/1:3: target is /dev/null, expected /dev/dsa/wq0.0"
    (tmp_path / "dev/char/1:3").unlink()
    link(tmp_path / "dev/char/1:3", "../dsa/wq0.0")
    (device,), _ = found(DsaPlugin(), tmp_path)
    assert device.nodes == (DeviceNode("/dev/dsa/wq0.0"), DeviceNode("/dev/char/1:3"))


def test_a_fifo_instead_of_a_device_node_is_reported(tmp_path: Path) -> None:
    queue(tmp_path, node=False)
    (tmp_path / "dev/dsa").mkdir(parents=True)
    os.mkfifo(tmp_path / "dev/dsa/wq0.0")
    _, (skipped,) = found(DsaPlugin(), tmp_path)
    assert skipped.reason == "/dev/dsa/wq0.0: not a character device"


async def test_a_container_with_two_devices_gets_different_queues(tmp_path: Path) -> None:
    queue(tmp_path, "wq0.0", mode="shared")
    queue(tmp_path, "wq0.1", mode="shared")
    plugin = DsaPlugin(DsaConfig(shared_dev_num=4))
    devices, _ = found(plugin, tmp_path)
    assert await plugin.preferred_allocation(devices, (), 2, {}) == [
        "wq-user-shared-wq0.0-0",
        "wq-user-shared-wq0.1-0",
    ]


VFIO = DsaConfig(driver="vfio-pci")


def test_vfio_mode_publishes_whole_functions(tmp_path: Path) -> None:
    function(tmp_path, "0000:6a:01.0")
    function(tmp_path, "0000:6a:02.0", device="0x1212", group=8)
    devices, skipped = found(DsaPlugin(VFIO), tmp_path)
    assert not skipped
    assert [(device.resource, device.id, device.nodes) for device in devices] == [
        ("vfio", "0000:6a:01.0", (DeviceNode("/dev/vfio/7"), DeviceNode("/dev/vfio/vfio"))),
        ("vfio", "0000:6a:02.0", (DeviceNode("/dev/vfio/8"), DeviceNode("/dev/vfio/vfio"))),
    ]


async def test_the_container_gets_the_addresses_in_requested_order(tmp_path: Path) -> None:
    function(tmp_path, "0000:6a:01.0")
    function(tmp_path, "0000:6a:02.0", group=8)
    plugin = DsaPlugin(VFIO)
    devices, _ = found(plugin, tmp_path)
    allocation = await plugin.post_allocate(devices[::-1], Allocation.of(devices[::-1]))
    assert allocation.envs == {"VFIO_BDF0": "0000:6a:02.0", "VFIO_BDF1": "0000:6a:01.0"}


@pytest.mark.parametrize(
    ("facts", "warning", "reason"),
    [
        ({"driver": "idxd"}, False, "bound to idxd, expected vfio-pci"),
        ({"driver": ""}, False, "bound to no driver, expected vfio-pci"),
        ({"group": -1}, True, "iommu_group"),
    ],
)
def test_a_function_that_cannot_be_published_is_reported(
    tmp_path: Path, facts: dict[str, Any], warning: bool, reason: str
) -> None:
    function(tmp_path, "0000:6a:01.0", **facts)
    function(tmp_path, "0000:6a:02.0", group=8)
    devices, (skipped,) = found(DsaPlugin(VFIO), tmp_path)
    assert [device.id for device in devices] == ["0000:6a:02.0"]
    assert skipped.warning is warning
    assert reason in skipped.reason


@pytest.mark.parametrize("facts", [{"device": "0x0cfe"}, {"vendor": "0x1002"}])
def test_other_functions_on_vfio_pci_are_ignored(tmp_path: Path, facts: dict[str, str]) -> None:
    function(tmp_path, "0000:6a:01.0", **facts)
    assert found(DsaPlugin(VFIO), tmp_path) == ([], [])


def test_iommufd_nodes_are_published_with_the_option(tmp_path: Path) -> None:
    function(tmp_path, "0000:6a:01.0")
    (tmp_path / "sys/devices/pci0000:6a/0000:6a:01.0/vfio-dev/vfio3").mkdir(parents=True)
    (device,), _ = found(DsaPlugin(DsaConfig(driver="vfio-pci", iommufd=True)), tmp_path)
    assert [node.host_path for node in device.nodes] == [
        "/dev/vfio/7",
        "/dev/vfio/vfio",
        "/dev/vfio/devices/vfio3",
        "/dev/iommu",
    ]


def test_shared_dev_num_without_effect_is_reported(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert not list(DsaPlugin(DsaConfig(driver="vfio-pci", shared_dev_num=3)).scan(host))
    assert host.notes == ["shared-dev-num 3 has no effect with driver vfio-pci"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shared-dev-num": 0}, "shared-dev-num is 0"),
        ({"shared-dev-num": -1}, "shared-dev-num is -1"),
        ({"driver": "uio"}, "driver"),
    ],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DsaConfig.of(options)


@settings(max_examples=examples(60))
@given(texts=st.tuples(*[st.binary(max_size=60)] * 2))
def test_no_content_of_a_queues_attributes_breaks_the_scan(tmp_path: Path, texts: tuple[bytes, ...]) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    directory = queue(root)
    for attribute, text in zip(("type", "mode"), texts, strict=True):
        write(directory / attribute, text)
    devices, skipped = found(DsaPlugin(), root)
    assert len(devices) + len(skipped) == 1
