"""Answers of one resource, without a kubelet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from accelplane.devices import UNHEALTHY, Allocation, Device, DeviceNode
from accelplane.kubelet.server import AllocationError
from accelplane.node.allocations import AllocationReader, CallRecord
from accelplane.node.allocator import ResourceAllocator
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.gpu import GpuPlugin


class ReadCounter(list[str]):
    """Counts how often it is read."""

    reads = 0

    def __iter__(self) -> Iterator[str]:
        self.reads += 1
        return super().__iter__()


async def test_each_id_list_is_read_once_for_any_number_of_devices(tmp_path: Path) -> None:
    settings = Settings(kubelet_dir=str(tmp_path), cdi_dir=str(tmp_path))
    context = PluginContext("gpu", GpuPlugin(), settings)
    devices = {f"card{n}-0": Device(resource="i915", id=f"card{n}-0") for n in range(40)}
    cdi = CdiPublisher(context, AllocationReader(settings))
    allocator = ResourceAllocator("gpu.intel.com/i915", context, cdi, CallRecord(), lambda: devices)
    available, fixed = ReadCounter(["stranger", *devices]), ReadCounter(["card7-0"])
    assert await allocator.preferred_allocation(available, fixed, 2) == ["card7-0", "card0-0"]
    assert (available.reads, fixed.reads) == (1, 1)


class Meters(Plugin[Config]):
    """Calls `change` while an allocation is being made."""

    namespace = "meters.example.com"

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        self.change = change

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        self.change()
        return allocation


def meters_allocator(
    directory: Path, change: Callable[[], None], devices: Callable[[], Mapping[str, Device]]
) -> ResourceAllocator:
    settings = Settings(kubelet_dir=str(directory), cdi_dir=str(directory))
    context = PluginContext("meters", Meters(change), settings)
    cdi = CdiPublisher(context, AllocationReader(settings))
    return ResourceAllocator("meters.example.com/meter", context, cdi, CallRecord(), devices)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"m0": Device(resource="meter", id="m0")}, ""),
        ({"m0": Device(resource="meter", id="m0", health=UNHEALTHY, reason="dented")}, r"unhealthy device 'm0 \(dent"),
        ({}, "unknown device 'm0'"),
    ],
)
async def test_a_device_that_changes_during_the_call_is_checked_again(
    tmp_path: Path, changed: Mapping[str, Device], problem: str
) -> None:
    devices = [{"m0": Device(resource="meter", id="m0")}]
    allocator = meters_allocator(tmp_path, lambda: devices.append(dict(changed)), lambda: devices[-1])
    if not problem:
        assert await allocator.allocate(["m0", "m0"]) == Allocation()
        return
    with pytest.raises(AllocationError, match=problem):
        await allocator.allocate(["m0"])


def replaced_meter(change: int) -> Mapping[str, Device]:
    """A device of the same ID with another device node after each change."""
    return {"m0": Device(resource="meter", id="m0", nodes=(DeviceNode(f"/dev/meter{change}"),))}


@pytest.mark.parametrize("changes", [1, 2])
async def test_a_device_that_is_replaced_during_the_call_is_allocated_as_the_new_one(
    tmp_path: Path, changes: int
) -> None:
    devices = [replaced_meter(0)]

    def change() -> None:
        if len(devices) <= changes:
            devices.append(replaced_meter(len(devices)))

    allocator = meters_allocator(tmp_path, change, lambda: devices[-1])
    allocation = await allocator.allocate(["m0"])
    assert [node.host_path for node in allocation.nodes] == [f"/dev/meter{changes}"]


async def test_a_device_that_is_replaced_again_and_again_fails_the_call(tmp_path: Path) -> None:
    devices = [replaced_meter(0)]
    allocator = meters_allocator(tmp_path, lambda: devices.append(replaced_meter(len(devices))), lambda: devices[-1])
    with pytest.raises(AllocationError, match="meter: device 'm0' was replaced during the call"):
        await allocator.allocate(["m0"])


async def test_ten_thousand_ids_with_repetitions_are_each_allocated_once(tmp_path: Path) -> None:
    devices = {f"m{n}": Device(resource="meter", id=f"m{n}", nodes=(DeviceNode(f"/dev/m{n}"),)) for n in range(5000)}
    allocator = meters_allocator(tmp_path, lambda: None, lambda: devices)
    allocation = await allocator.allocate([*devices, *reversed(devices)])
    assert [node.host_path for node in allocation.nodes] == [f"/dev/m{n}" for n in range(5000)]


async def test_a_container_without_ids_gets_no_device(tmp_path: Path) -> None:
    allocator = meters_allocator(tmp_path, lambda: None, lambda: replaced_meter(0))
    assert await allocator.allocate([]) == Allocation()
