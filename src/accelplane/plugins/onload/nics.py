"""Solarflare NICs of a node, from sysfs.

`/sys/class/net` shows the network interfaces of one network namespace: that in which sysfs was mounted. A process that
is not in the namespace of the host, or a NIC that was moved into that of a pod, is found by its PCI function instead.
Facts: Documentation/ABI/testing/sysfs-class-net and sysfs-bus-pci.
"""

import re
from typing import NamedTuple

from accelplane.host import Host, HostError, Missing

VENDOR = "0x1924"

_NETWORK_CONTROLLER = "0x02"
_DRIVERS = "sfc"  # and sfc_ef100 and others whose names begin so
_NUMBER = re.compile(r"[0-9]{1,9}")


class Nic(NamedTuple):
    """One NIC: the name of its interface, or its PCI address, and its NUMA node, -1 if it has none."""

    name: str
    numa_node: int


def find_nics(host: Host) -> list[Nic]:
    """The NICs in the order of their names. Unreadable ones are noted. Raises `Unreadable`."""
    return _interfaces(host) or [Nic(path.rpartition("/")[2], _numa_node(host, path)) for path in find_functions(host)]


def find_functions(host: Host) -> list[str]:
    """The directories of the PCI functions with a driver for NICs, in the order of their addresses."""
    return [
        function.path
        for function in host.pci_devices(VENDOR)
        # A function that a virtual machine or DPDK uses is bound to another driver.
        if function.cls.startswith(_NETWORK_CONTROLLER) and host.driver_or_empty(function.path).startswith(_DRIVERS)
    ]


def numa_nodes(nics: list[Nic]) -> tuple[int, ...] | None:
    """The NUMA nodes in the order of the NICs; None if no NIC has one."""
    return tuple(dict.fromkeys(nic.numa_node for nic in nics if nic.numa_node >= 0)) or None


def _interfaces(host: Host) -> list[Nic]:
    found: list[Nic] = []
    for name, path in host.class_devices("net"):
        try:
            if host.raw_text(f"{path}/device/vendor").removesuffix("\n") == VENDOR:
                found.append(Nic(name, _numa_node(host, f"{path}/device")))
        except Missing:
            continue
        except HostError as error:
            host.note(f"network interface {name[:40]!a} skipped: {error}")
    return found


def _numa_node(host: Host, device: str) -> int:
    text = host.text_or_empty(f"{device}/numa_node")
    return int(text) if _NUMBER.fullmatch(text) else -1
