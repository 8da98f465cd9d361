"""A directory of CDI files: one file for each CDI device.

Files are written before a device is advertised, because after a reboot the directory is empty and the kubelet does not
call Allocate again for pods that it restarts. They are checked at each allocation. A file that differs is replaced
atomically. A name that a file of another program defines is not written: runtimes ignore a name with two definitions.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from accelplane.devices import CdiDevice, CdiError
from accelplane.devices.cdi import document
from accelplane.node import atomic_file
from accelplane.node.atomic_file import Stamp, stamp_of

log = logging.getLogger(__name__)

_FILE_LIMIT = 1024 * 1024
_FILES_LIMIT = 4096


class CdiWriteError(Exception):
    """A CDI file could not be written; names the file and the reason."""


class CdiDirectory:
    """One directory of CDI files. Its methods block; `is_current` takes one stat(2), with groups one for each node too.

    `groups_below` is the root of the host's device nodes, whose groups containers get; empty for no groups.
    """

    def __init__(self, directory: str, *, groups_below: str = "") -> None:
        self.directory = directory
        self._groups_below = groups_below
        self.writes = 0
        self.write_failures = 0
        self._written: dict[str, tuple[CdiDevice, Stamp]] = {}
        self._read_names = lru_cache(maxsize=_FILES_LIMIT)(_read_names)
        self._reported: dict[str, str] = {}

    def publish(self, devices: Iterable[CdiDevice]) -> None:
        """Writes the files of `devices`. Write errors are logged once for each cause."""
        desired = {device.qualified_name: device for device in devices}
        if not desired:
            return
        other_names = self._names_in_other_files({device.file_name for device in desired.values()})
        for name, device in desired.items():
            if name in other_names:
                self._report(name, f"CDI device {name} is already defined in {other_names[name]}; that file is used")
                self._written.pop(name, None)
                self._remove(device.file_name)
                continue
            try:
                self._write(device)
                self._reported.pop(name, None)
            except CdiWriteError as error:
                self._report(name, str(error))

    def is_current(self, device: CdiDevice) -> bool:
        """Whether the device's file exists as this process wrote or last read it."""
        known = self._written.get(device.qualified_name)
        return known is not None and known == (self._with_groups(device), stamp_of(self._path(device)))

    def ensure(self, device: CdiDevice) -> None:
        """Writes the device's file unless it is current. Raises `CdiWriteError`."""
        name = device.qualified_name
        defined_elsewhere = name not in self._written and name in self._names_in_other_files({device.file_name})
        if not self.is_current(device) and not defined_elsewhere:
            self._write(device)

    def stale(self, kinds: Collection[str], desired: Collection[str]) -> Mapping[str, str]:
        """Files of the given kinds whose device is not in `desired`: qualified name to file name."""
        found: dict[str, str] = {}
        prefixes = tuple(f"{kind.replace('/', '-')}-" for kind in kinds)
        for name in self._listing():
            if name.startswith(prefixes) and name.endswith(".yaml"):
                defined = self._defined_in(name)
                for kind, prefix in zip(kinds, prefixes, strict=True):
                    qualified = f"{kind}={name.removeprefix(prefix).removesuffix('.yaml')}"
                    if defined == frozenset((qualified,)) and qualified not in desired:
                        found[qualified] = name
        return found

    def remove(self, files: Mapping[str, str]) -> None:
        """Removes stale files, qualified name to file name. Errors are logged."""
        for qualified_name, file_name in files.items():
            self._written.pop(qualified_name, None)
            if self._remove(file_name):
                log.info("removed %s of a removed device", os.path.join(self.directory, file_name))

    def remove_written(self) -> None:
        """Removes every file that this process has written and that was not changed since."""
        for device, stamp in list(self._written.values()):
            if stamp_of(self._path(device)) == stamp:
                self._remove(device.file_name)
        self._written.clear()

    def _path(self, device: CdiDevice) -> str:
        return os.path.join(self.directory, device.file_name)

    def _write(self, device: CdiDevice) -> None:
        path = self._path(device)
        device = self._with_groups(device)
        try:
            text = _render(document((device,)))
            if atomic_file.content(path, _FILE_LIMIT) != text:
                os.makedirs(self.directory, mode=0o755, exist_ok=True)
                atomic_file.replace(path, text, prefix="spec.")
                self.writes += 1
            stamp = stamp_of(path)
        except CdiError as error:
            self.write_failures += 1
            raise CdiWriteError(f"not written: {error}") from error
        except OSError as error:
            self.write_failures += 1
            raise CdiWriteError(f"cannot write {path}: {error.strerror}") from error
        if stamp is not None:
            self._written[device.qualified_name] = (device, stamp)

    def _with_groups(self, device: CdiDevice) -> CdiDevice:
        """Adds the groups of the device's nodes except that of root, which udev changes after the kernel's event."""
        if not self._groups_below:
            return device
        found: set[int] = set()
        for node in device.nodes:
            with contextlib.suppress(OSError):
                found.add(os.stat(self._groups_below.rstrip("/") + node.host_path).st_gid)
        return replace(device, gids=sorted(found - {0}))

    def _remove(self, file_name: str) -> bool:
        path = os.path.join(self.directory, file_name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._report(file_name, f"cannot remove {path}: {error.strerror}")
            return False
        self._reported.pop(file_name, None)
        return True

    def _listing(self) -> list[str]:
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        return sorted(name for name in names if name.endswith((".yaml", ".json")))[:_FILES_LIMIT]

    def _names_in_other_files(self, own: Collection[str]) -> dict[str, str]:
        names: dict[str, str] = {}
        for file_name in self._listing():
            if file_name not in own:
                names.update(dict.fromkeys(self._defined_in(file_name), os.path.join(self.directory, file_name)))
        return names

    def _defined_in(self, file_name: str) -> frozenset[str]:
        """The qualified names that a file defines, none if it is no valid CDI file. Symbolic links are followed."""
        path = os.path.join(self.directory, file_name)
        stamp = stamp_of(path, follow=True)
        return self._read_names(path, stamp) if stamp is not None else frozenset()

    def _report(self, name: str, problem: str) -> None:
        if self._reported.get(name) != problem:
            self._reported[name] = problem
            log.warning("%s", problem)


class _NamedDevice(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct):
    """The part of a CDI file that defines its names."""

    kind: str
    devices: list[_NamedDevice] = []


def _read_names(path: str, _stamp: Stamp) -> frozenset[str]:
    """The names that a file defines. The stamp is for a cache: a file with another one is read again."""
    from accelplane.node import foreign_yaml  # noqa: PLC0415 - memory of a node without CDI devices

    try:
        content: Any = foreign_yaml.load(atomic_file.content(path, _FILE_LIMIT, follow=True) or b"")
        spec = msgspec.convert(content, _Spec)
    except (foreign_yaml.YamlError, msgspec.ValidationError):
        return frozenset()
    return frozenset(f"{spec.kind}={device.name}" for device in spec.devices)


def _render(content: Mapping[str, object]) -> bytes:
    import yaml  # noqa: PLC0415 - memory of a node without CDI devices

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(
        content, Dumper=dumper, explicit_start=True, default_flow_style=False, encoding="utf-8", width=4096
    )
