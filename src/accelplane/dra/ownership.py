"""Which units of a family DRA hands out, as a file that all processes of the node agree on.

A unit that the file does not name belongs to the device plugin. A process holds the file's lock shared while it hands
out units of the family, by either API, and alone while it changes the file. So two processes with one configuration
serve both during a rolling update, and one with another configuration waits until the earlier has ended.

The lock is an open file description lock (fcntl(2)): its conversion is atomic, and a conversion that fails keeps it.
The file is replaced atomically. It is below the kubelet's directory, which all containers of the node see at one path.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Callable, Collection, Iterable
from typing import Literal

import msgspec
from msgspec import Struct

from accelplane.descriptors import read_limited
from accelplane.dra import durable
from accelplane.dra.model import Owner

log = logging.getLogger(__name__)

_API_VERSION = "ownership.accelplane/v1"
_LIMIT = 1024 * 1024
_Lock = Literal["shared", "alone", "none"]
_LOCKS = {"shared": fcntl.F_RDLCK, "alone": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


def owner_of(wanted: Owner, *, recorded: bool, held: bool) -> Owner:
    """Who may hand out a unit now, without a change of the record.

    `wanted` is from the configuration, `recorded` whether the unit belongs to DRA, `held` whether a container has it by
    the device plugin.
    """
    if wanted == "plugin":
        return "none" if recorded else "plugin"
    return "dra" if wanted == "dra" and recorded and not held else "none"


class OwnershipError(Exception):
    """The file cannot be read or written. The message names it."""


class _Document(Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str = _API_VERSION
    dra: list[str] = []


class OwnershipRecord:
    """The units of a family that belong to DRA. There is no file without such units.

    For one thread at a time; `change` syncs the file and its directory.
    """

    def __init__(self, directory: str, family: str) -> None:
        self.path = f"{directory}/{family}.json"
        self.units: frozenset[str] = frozenset()
        # The file was not readable and was set aside: any unit may have belonged to DRA.
        self.lost = False
        self._directory = directory
        self._descriptor: int | None = None

    def open(self) -> bool:
        """Takes the lock shared and reads the file. False while another process changes it. Raises `OwnershipError`."""
        try:
            if self._descriptor is None:
                os.makedirs(self._directory, mode=0o750, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(f"{self.path.removesuffix('.json')}.lock", flags, 0o600)
            if not self._convert("shared"):
                return False
            self.units = self._read()
        except OSError as error:
            raise OwnershipError(f"{self.path}: {error.strerror or error}") from error
        return True

    def change(
        self, *, add: Iterable[str] = (), remove: Iterable[str] = (), held: Callable[[], Collection[str]] = frozenset
    ) -> bool:
        """Changes the file; afterwards its content is on the disk. False if another process holds the lock.

        `held` returns units that are not removed. It is called when no other process hands out units any more: one
        that has just ended may have prepared a claim. Raises `OwnershipError`, and what `held` raises; then nothing has
        changed for this process.
        """
        units = self.units.union(add).difference(remove)
        if units == self.units and not self.lost:
            return True
        try:
            if not self._convert("alone"):
                return False
            try:
                if self.units - units:
                    units |= self.units.intersection(held())
                if units != self.units or self.lost:
                    self._write(units)
            finally:
                self._convert("shared")
        except OSError as error:
            raise OwnershipError(f"{self.path}: {error.strerror or error}") from error
        self.units = units
        self.lost = False
        return True

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _convert(self, lock: _Lock) -> bool:
        if self._descriptor is None:
            raise OwnershipError(f"{self.path}: not open")
        # struct flock: type, whence, start, length, process
        argument = struct.pack("hhqqi4x", _LOCKS[lock], os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, argument)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES
            return False
        return True

    def _read(self) -> frozenset[str]:
        """Sets a file aside that is not readable. Raises `OSError`, and `OwnershipError` for a later version's file."""
        try:
            document = msgspec.json.decode(read_limited(self.path, _LIMIT), type=_Document)
        except FileNotFoundError:
            return frozenset()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("%s: found %s, expected the units that belong to DRA; renamed to *.bad", self.path, error)
            os.replace(self.path, f"{self.path}.bad")
            self.lost = True
            return frozenset()
        if document.api_version != _API_VERSION:
            raise OwnershipError(
                f"{self.path}: found apiVersion {document.api_version[:80]!a}, expected {_API_VERSION}; "
                "run the version that wrote it"
            )
        return frozenset(document.dra)

    def _write(self, units: frozenset[str]) -> None:
        """Raises `OSError`. Without units there is no file."""
        if units:
            durable.write(self.path, msgspec.json.encode(_Document(dra=sorted(units))), 0o600)
        else:
            durable.remove(self.path)
