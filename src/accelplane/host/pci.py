"""PCI functions in sysfs (kernel document: Documentation/ABI/testing/sysfs-bus-pci)."""

import re
from typing import NamedTuple

from accelplane.host.errors import HostError
from accelplane.host.files import HostFiles

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


def functions(host: HostFiles, vendor: str | None) -> list[PciDevice]:
    """See `Host.pci_devices`."""
    found: list[PciDevice] = []
    for name, path in host.class_devices("pci", bus=True):
        if pci_address(name) is None:
            continue
        try:
            made_by = host.text(f"{path}/vendor")
            if vendor in (None, made_by):
                found.append(PciDevice(name, path, made_by, host.text(f"{path}/device"), host.text(f"{path}/class")))
        except HostError as error:
            host.note(f"PCI function {name} left out: {error}")
    return found
