"""Verdicts that kernel events imply, in a file: they hold after a restart of the agent, until the next boot."""

import contextlib
import logging
import os
from collections.abc import Mapping

import msgspec

from accelplane.descriptors import read_limited
from accelplane.devices import Verdict
from accelplane.host import Host, HostError
from accelplane.host.pci import DEVICES
from accelplane.node import atomic_file

log = logging.getLogger(__name__)

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAME = ".accelplane-events"  # CDI files end in .json or .yaml
_LIMIT = 1024 * 1024


class EventVerdict(msgspec.Struct, frozen=True):
    """A bad verdict, and the `binding` of the function to its driver at the time of the event."""

    verdict: Verdict
    binding: int


class _Content(msgspec.Struct):
    boot_id: str
    devices: dict[str, EventVerdict]


class EventStore:
    """The verdicts by PCI address in a file of `directory`, which should not survive a reboot either."""

    def __init__(self, directory: str, root: str) -> None:
        self._path = os.path.join(directory, _NAME)
        self._root = root
        self._problem = ""

    def binding(self, address: str) -> int:
        """A number that changes when a driver is bound to the function, 0 if none is bound.

        The kernel makes the link `driver` at each bind, and files of sysfs do not get inode numbers of earlier ones.
        """
        try:
            return os.lstat(f"{Host(self._root).local(f'{DEVICES}/{address}')}/driver").st_ino
        except (OSError, HostError):
            return 0

    def load(self) -> dict[str, EventVerdict]:
        """The verdicts of this boot; none if the file cannot be read."""
        data = atomic_file.content(self._path, _LIMIT)
        if data is None:
            return {}
        try:
            content = msgspec.json.decode(data, type=_Content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s: found %s, expected verdicts of kernel events; ignored", self._path, error)
            return {}
        return content.devices if content.boot_id == _boot_id() else {}

    def save(self, devices: Mapping[str, EventVerdict]) -> None:
        """Replaces the file, or removes it if there are no verdicts. Logs an error once."""
        try:
            if devices:
                os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
                content = msgspec.json.encode(_Content(_boot_id(), dict(devices)))
                atomic_file.replace(self._path, content, prefix=_NAME)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            problem = ""
        except OSError as error:
            problem = f"{self._path}: not written: {error.strerror}; unhealthy devices are healthy after a restart"
            if problem != self._problem:
                log.warning("%s", problem)
        self._problem = problem


def _boot_id() -> str:
    try:
        return read_limited(BOOT_ID, 64).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
