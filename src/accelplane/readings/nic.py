"""Sources of Solarflare NICs: sensors, and the statistics of network interfaces.

sysfs shows the interfaces of the network namespace in which it was mounted: statistics need that of the host. The
sensors need none. The driver queries the firmware once a second at most; sometimes a sensor has no value (`EBUSY`).
"""

import re
from collections.abc import Iterator

from accelplane.host import Host
from accelplane.readings import families, hwmon, pci
from accelplane.readings.plan import Source
from accelplane.readings.values import labels, scalar

_INTERFACE = re.compile(r"[!-~]{1,15}", re.ASCII)  # dev_valid_name of the kernel, without other characters than ASCII
_MAX_INTERFACES = 16
_COUNTERS = {
    "bytes": families.NIC_BYTES, "packets": families.NIC_PACKETS, "errors": families.NIC_ERRORS,
    "dropped": families.NIC_DROPS,
}  # fmt: skip
_DIRECTIONS = {"rx": "receive", "tx": "transmit"}


def sources(host: Host, function: str) -> Iterator[Source]:
    """`function` is the directory of the PCI function."""
    yield from pci.sources(host, function)
    yield from hwmon.sources(host, function)
    for name in sorted(host.entries(f"{function}/net"))[:_MAX_INTERFACES]:
        if _INTERFACE.fullmatch(name) and "/" not in name:
            yield from _statistics(host, f"{function}/net/{name}", name)


def _statistics(host: Host, path: str, interface: str) -> Iterator[Source]:
    parsers = [
        (f"{short}_{name}", scalar(family, extra=labels(interface=interface, direction=direction)))
        for name, family in _COUNTERS.items()
        for short, direction in _DIRECTIONS.items()
    ]
    yield from pci.existing(host, f"{path}/statistics", parsers)
    parse = scalar(families.NIC_CARRIER_CHANGES, extra=labels(interface=interface))
    yield from pci.existing(host, path, [("carrier_changes", parse)])
