"""Answers of one resource, without a kubelet."""

from collections.abc import Iterator
from pathlib import Path

from accelplane.devices import Device
from accelplane.node.allocations import AllocationReader, CallRecord
from accelplane.node.allocator import ResourceAllocator
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.settings import Settings
from accelplane.plugins.gpu import GpuPlugin


class Question(list[str]):
    """Counts how often it is read."""

    reads = 0

    def __iter__(self) -> Iterator[str]:
        self.reads += 1
        return super().__iter__()


async def test_a_question_is_read_once_however_many_devices_there_are(tmp_path: Path) -> None:
    settings = Settings(kubelet_dir=str(tmp_path), cdi_dir=str(tmp_path))
    context = PluginContext("gpu", GpuPlugin(), settings)
    devices = {f"card{n}-0": Device(resource="i915", id=f"card{n}-0") for n in range(40)}
    cdi = CdiPublisher(context, AllocationReader(settings))
    allocator = ResourceAllocator("gpu.intel.com/i915", context, cdi, CallRecord(), lambda: devices)
    available, fixed = Question(["stranger", *devices]), Question(["card7-0"])
    assert await allocator.preferred(available, fixed, 2) == ["card7-0", "card0-0"]
    assert (available.reads, fixed.reads) == (1, 1)
