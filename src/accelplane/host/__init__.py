"""The node as files: sysfs and devfs below a root, PCI, NUMA, and the kernel's change events. No policy.

The modules of events, `inotify` and `uevent`, are not imported here: their dependencies (ctypes, socket) take longer to
load than a short-lived command takes to run.
"""

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError
from accelplane.host.files import SysfsDevice
from accelplane.host.host import Host
from accelplane.host.pci import PciDevice, pci_address

__all__ = [
    "Host",
    "HostError",
    "Missing",
    "PciDevice",
    "SysfsDevice",
    "Unreadable",
    "WriteError",
    "pci_address",
]
