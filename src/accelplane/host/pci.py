"""PCI functions in sysfs (kernel document: Documentation/ABI/testing/sysfs-bus-pci)."""

import re
from typing import NamedTuple

DEVICES = "/sys/bus/pci/devices"

# Domains behind an Intel VMD have five or more digits.
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


class PciDevice(NamedTuple):
    """One function: its address (`0000:3d:00.0`), directory, and ids as sysfs spells them (`0x8086`, `0x030000`)."""

    address: str
    path: str
    vendor: str
    device: str
    cls: str


def pci_address(text: str) -> str | None:
    """`text` if it is a PCI address (domain:bus:device.function, lower-case hexadecimal), else None."""
    return text if _ADDRESS.fullmatch(text) else None
