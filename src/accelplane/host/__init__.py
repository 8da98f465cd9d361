"""The node as files: sysfs and devfs below a root, PCI, NUMA, and the kernel's notices of change. No policy.

The notices are imported when somebody asks for them: what they stand on (ctypes, socket) takes longer to load than all
that a short-lived command does.
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
