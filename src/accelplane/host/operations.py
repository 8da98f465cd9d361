"""The file operation that a thread executes, and the devices of which an operation has not returned.

A read of sysfs can block for as long as the kernel holds the lock of the device. `isolation` detects this from
`Operation`; every `Host` of the process then neither reads nor lists files of the device (decision 0027).
"""

import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from accelplane.host.errors import Unreadable

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_SYSFS_DEVICE_DEPTH = 4  # /sys/class/<subsystem>/<device>, or deeper


class AbandonedError(BaseException):
    """Ends a function whose operation has blocked and has returned since. No plugin should catch it."""


class BlockedError(Unreadable):
    """The file is of a device of which another operation has not returned. It was not read."""


class Blocked(NamedTuple):
    """The path of an operation that has not returned, and the monotonic time of its begin."""

    path: str
    since: float


BlockedByDevice = MutableMapping[str, Blocked]
NOTHING_BLOCKED: Mapping[str, Blocked] = {}


class Operation:
    """A context of each file operation of one thread: `path` while it is in progress, and how many there were."""

    __slots__ = ("abandoned", "count", "path")

    def __init__(self) -> None:
        self.count = 0
        self.path = ""
        self.abandoned = False

    def of(self, path: str) -> "Operation":
        self.count += 1
        self.path = path
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: object) -> None:
        """Raises `AbandonedError` if the thread is not waited for any more."""
        self.path = ""
        if self.abandoned:
            raise AbandonedError


def device_of(path: str) -> str:
    """The physical device that a path without links belongs to.

    It is the PCI address that the path names last, else the directory of the attribute in sysfs, else the path.
    """
    if addresses := _PCI.findall(path):
        return addresses[-1]
    directory = path.rpartition("/")[0]
    return directory if path.startswith("/sys/") and directory.count("/") >= _SYSFS_DEVICE_DEPTH else path


def blocked_device(path: str, blocked: Mapping[str, Blocked]) -> str:
    """The blocked device that a path without links belongs to, empty if there is none."""
    device = device_of(path)
    if device in blocked:
        return device
    if _PCI.search(path):
        return ""
    return next((each for each in blocked if each.startswith("/") and f"{path}/".startswith(f"{each}/")), "")
