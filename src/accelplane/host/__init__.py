"""The node as files: sysfs and devfs below a root, PCI, NUMA, and the kernel's change events. No policy.

The modules of events are imported on first use: their dependencies (ctypes, socket) take longer to load than a
short-lived command takes to run.
"""

from typing import TYPE_CHECKING

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError
from accelplane.host.files import SysfsDevice
from accelplane.host.host import Host
from accelplane.host.pci import PciDevice, pci_address

if TYPE_CHECKING:
    from accelplane.host.inotify import Inotify, InotifyEvent
    from accelplane.host.uevent import Uevent, UeventSocket, parse_uevent

__all__ = [
    "Host",
    "HostError",
    "Inotify",
    "InotifyEvent",
    "Missing",
    "PciDevice",
    "SysfsDevice",
    "Uevent",
    "UeventSocket",
    "Unreadable",
    "WriteError",
    "parse_uevent",
    "pci_address",
]


def __getattr__(name: str) -> object:
    if name in ("Inotify", "InotifyEvent"):
        from accelplane.host import inotify as module  # noqa: PLC0415 - see above
    elif name in ("Uevent", "UeventSocket", "parse_uevent"):
        from accelplane.host import uevent as module  # noqa: PLC0415 - see above
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(module, name)
    return found
