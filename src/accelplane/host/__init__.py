"""The node as files: sysfs and devfs below a root, PCI, NUMA, and the kernel's notices of change. No policy."""

from accelplane.host.files import Host, HostError, Missing, Refused, SysfsDevice, Unreadable
from accelplane.host.inotify import Inotify, InotifyEvent
from accelplane.host.pci import PciDevice, pci_address
from accelplane.host.uevent import Uevent, UeventSocket, parse_uevent

__all__ = [
    "Host",
    "HostError",
    "Inotify",
    "InotifyEvent",
    "Missing",
    "PciDevice",
    "Refused",
    "SysfsDevice",
    "Uevent",
    "UeventSocket",
    "Unreadable",
    "parse_uevent",
    "pci_address",
]
