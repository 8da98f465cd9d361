"""Publishes the CDI files of one plugin's devices, and removes those that no device and no container needs."""

import asyncio
import logging
import time
from collections.abc import Iterable

from accelplane.devices import CdiDevice, Device
from accelplane.host.blocking import SerialThread, ThreadLimitError
from accelplane.node.allocations import AllocationReader, Key
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi_directory import CdiDirectory, CdiWriteError

log = logging.getLogger(__name__)

_END_TIMEOUT = 2.0


class CdiPublisher:
    """The directory's files are read and written in a thread."""

    def __init__(self, context: PluginContext, allocations: AllocationReader) -> None:
        settings = context.settings
        self.directory = CdiDirectory(settings.cdi_dir, groups_below=settings.root if settings.cdi_groups else "")
        self._context = context
        self._allocations = allocations
        self._thread = SerialThread()
        self._lock = asyncio.Lock()  # held while files are written or removed
        self._published: frozenset[str] | None = None
        self._names: dict[Key, str] = {}
        self._pruned = False

    async def ensure(self, device: CdiDevice) -> None:
        """Writes the device's file if needed. Raises `CdiWriteError`."""
        try:
            await self._thread.run(lambda: self.directory.ensure(device))
        except ThreadLimitError as error:
            raise CdiWriteError(f"cannot write {device.file_name}: {error}") from error

    async def publish(self, found: Iterable[Device], listed: Iterable[Device]) -> bool:
        """Writes the files of all `listed` devices; returns whether that took time.

        `found` are the devices of the last scan. Only their CDI names are known for certain: an ID that was listed
        because a container holds it may have had another one before the agent started.
        """
        namespace = self._context.plugin.namespace
        for device in found:
            name = device.cdi.qualified_name if device.cdi is not None else ""
            self._names[f"{namespace}/{device.resource}", device.id] = name
        desired = {device.cdi.qualified_name: device.cdi for device in listed if device.cdi is not None}
        if desired.keys() != self._published:
            self._published, self._pruned = frozenset(desired), False
        # A file that is current now may be one that `prune` is about to remove.
        if not self._lock.locked() and all(map(self.directory.is_current, desired.values())):
            return False
        async with self._lock:
            try:
                await self._thread.run(lambda: self.directory.publish(desired.values()))
            except ThreadLimitError as error:
                problem = "%s: CDI files not written: %s; each is written when a container gets its device"
                log.warning(problem, self._context.name, error)
        return True

    @property
    def needs_prune(self) -> bool:
        """Whether there may be files that no listed device needs."""
        return not self._pruned and bool(self._context.plugin.cdi_kinds)

    async def prune(self) -> None:
        """Removes files of the plugin's CDI kinds that belong to no listed device and that no container uses."""
        try:
            await self._prune()
        except ThreadLimitError:
            self._pruned = False

    async def _prune(self) -> None:
        kinds = self._context.plugin.cdi_kinds
        self._pruned = True  # a change of the published names during the awaits resets it
        published = self._published or frozenset()
        stale = await self._thread.run(lambda: self.directory.stale(kinds, published))
        if not stale:
            return
        used = await self._names_in_use()
        if used is None:
            self._pruned = False
            return
        async with self._lock:
            used |= self._published or frozenset()
            unused = {name: file_name for name, file_name in stale.items() if name not in used}
            await self._thread.run(lambda: self.directory.remove(unused))
        if len(unused) < len(stale):
            self._pruned = False

    async def close(self, *, remove: bool) -> None:
        """Waits for the thread; with `remove`, removes the files that this process has written."""
        if await self._thread.wait_idle(self._context.name, _END_TIMEOUT) and remove:
            await self._thread.run(self.directory.remove_written)

    async def _names_in_use(self) -> set[str] | None:
        """CDI names of the IDs that containers hold; None if that is not known for all of them."""
        reading = await self._allocations.read(time.monotonic())
        if reading.record != "read":
            return None
        prefix = f"{self._context.plugin.namespace}/"
        held = {key for key in reading.held if key[0].startswith(prefix)}
        if not held <= self._names.keys():
            return None  # allocated before this process started
        used = {self._names[key] for key in held}
        self._names = {key: name for key, name in self._names.items() if key in held or name in (self._published or ())}
        return used
