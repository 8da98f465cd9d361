"""The generic plugin: allocation, metrics, explanation and hooks."""

from pathlib import Path

import pytest
from generictrees import found, plugin
from trees import write

from accelplane.devices import Allocation, Device, DeviceNode
from accelplane.host import Host
from accelplane.plugins import Sample
from accelplane.plugins.generic import GenericPlugin

pytestmark = pytest.mark.memory


def dev(root: Path, *names: str) -> None:
    for name in names:
        write(root / "dev" / name, "")


async def test_values_of_several_devices_are_separated_by_commas(tmp_path: Path) -> None:
    dev(tmp_path, "a0", "a1")
    group = {"paths": [{"path": "/dev/a*"}], "env": {"DEVICES": "{path}", "MODE": "fast"}}
    devices = sorted(found(tmp_path, group), key=lambda device: device.unit)
    allocation = await plugin(group).post_allocate(devices, Allocation.of(devices))
    assert allocation.envs == {"DEVICES": "/dev/a0,/dev/a1", "MODE": "fast"}
    assert [node.host_path for node in allocation.nodes] == ["/dev/a0", "/dev/a1"]


@pytest.mark.parametrize("kind", ["Device", "Mount"])
async def test_two_files_for_one_path_in_the_container_fail_the_pod(tmp_path: Path, kind: str) -> None:
    dev(tmp_path, "a0", "a1")
    group = {"paths": [{"path": "/dev/a*", "mountPath": "/dev/a", "type": kind}]}
    devices = list(found(tmp_path, group))
    with pytest.raises(ValueError, match=r"^/dev/a: found /dev/a0, /dev/a1 for this path in the container"):
        await plugin(group).post_allocate(devices, Allocation.of(devices))


async def test_shares_of_one_device_are_no_conflict(tmp_path: Path) -> None:
    dev(tmp_path, "fuse")
    group = {"count": 2, "paths": [{"path": "/dev/fuse", "mountPath": "/dev/f"}]}
    devices = list(found(tmp_path, group))
    allocation = await plugin(group).post_allocate(devices, Allocation.of(devices))
    assert allocation.nodes == (DeviceNode("/dev/fuse", "/dev/f", "mrw"),)


async def test_a_container_gets_different_devices_before_shares_of_one(tmp_path: Path) -> None:
    dev(tmp_path, "a0", "a1")
    group = {"count": 5, "paths": [{"path": "/dev/a*"}]}
    devices = list(found(tmp_path, group))
    chosen = await plugin(group).preferred_allocation(devices, [], 2, {})
    assert {device.unit for device in devices if device.id in chosen} == {"/dev/a0", "/dev/a1"}


async def test_metrics_have_the_names_of_the_original_project(tmp_path: Path) -> None:
    subject = plugin({"paths": [{"path": "/dev/a"}]})
    devices = [Device(resource="thing", id="a"), Device(resource="thing", id="b")]
    await subject.post_allocate(devices, Allocation.of(devices))
    samples = list(subject.measure(Host(tmp_path), devices[:1]))
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("generic_device_plugin_devices", {"resource": "squat.ai/thing"}, 1.0),
        ("generic_device_plugin_allocations_total", {"resource": "squat.ai/thing"}, 1.0),
    ]
    assert isinstance(samples[0], Sample)


def test_the_explanation_counts_the_devices_of_each_group(tmp_path: Path) -> None:
    dev(tmp_path, "a0", "a1")
    subject = plugin({"paths": [{"path": "/dev/a*"}]}, {"usb": [{"vendor": "1a86"}]})
    assert subject.explain(Host(tmp_path)) == {"thing": [2, 0]}


def test_hooks_without_work_are_not_called() -> None:
    hooks = ("background", "health", "prepare")
    assert [GenericPlugin().overrides(hook) for hook in hooks] == [False, False, False]
    health = {"command": ["/bin/true"]}
    needed = plugin({"pci": [{"vendor": "8086", "device": "1572", "bind": True}], "health": health})
    assert [needed.overrides(hook) for hook in hooks] == [True, True, True]


def test_groups_with_commands_have_units_of_their_own(tmp_path: Path) -> None:
    """Otherwise the verdict of one command would be that of another resource with the same device."""
    dev(tmp_path, "a")
    health = {"command": ["/bin/test", "-e", "{path}"]}
    (device,) = found(tmp_path, {"paths": [{"path": "/dev/a"}], "health": health})
    assert device.unit == "thing:/dev/a"
