"""Sources of Intel NPUs: the driver ivpu has them beside the PCI attributes. None of them wakes the device up."""

from collections.abc import Iterator

from accelplane.host import Host
from accelplane.readings import families, pci
from accelplane.readings.plan import Source
from accelplane.readings.values import labels, scalar

_MAX_HERTZ = 100e9

busy_time = scalar(families.NPU_BUSY, scale=1e-6)
"""The parser of `npu_busy_time_us`."""


def sources(host: Host, device: str) -> Iterator[Source]:
    """`device` is the directory of the PCI function."""
    yield from pci.sources(host, device)
    current, largest = (
        scalar(families.NPU_FREQUENCY, scale=1e6, extra=labels(kind=kind), highest=_MAX_HERTZ)
        for kind in ("actual", "max")
    )
    parsers = [
        ("npu_busy_time_us", busy_time),
        ("npu_memory_utilization", scalar(families.NPU_MEMORY)),
        ("npu_current_frequency_mhz", current),
        ("npu_max_frequency_mhz", largest),
    ]
    yield from pci.existing(host, device, parsers)
