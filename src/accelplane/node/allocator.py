"""Answers the kubelet's calls about one resource: from the devices as listed, the plugin's hooks and the CDI files."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from accelplane.devices import Allocation, Device
from accelplane.kubelet.server import AllocationError
from accelplane.node.allocations import CallRecord
from accelplane.node.context import PluginContext
from accelplane.node.hook_results import checked_allocation, checked_choice
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.publishers.cdi_directory import CdiWriteError

log = logging.getLogger(__name__)

_MAX_SHOWN_IDS = 5
_ATTEMPTS = 3


class ResourceAllocator:
    """The `Allocator` of one resource. `devices()` are those that the kubelet's list has now."""

    def __init__(
        self,
        resource: str,
        context: PluginContext,
        cdi: CdiPublisher,
        calls: CallRecord,
        devices: Callable[[], Mapping[str, Device]],
    ) -> None:
        self.resource = resource
        self.devices = devices
        self._calls = calls
        self._context = context
        self._cdi = cdi

    @property
    def prefers(self) -> bool:
        return self._context.plugin.overrides("preferred_allocation")

    @property
    def pre_starts(self) -> bool:
        return self._context.plugin.overrides("pre_start")

    async def allocate(self, ids: Sequence[str], *, alone: bool = True) -> Allocation:
        """A container's answer for `ids`, each counted once. Raises `AllocationError` for unknown or unhealthy IDs."""
        ids = tuple(ids)  # a repeated field, which is slow to read
        with self._calls.record_call(ids):
            self._check_unclaimed(ids)
            allocator = self._context.pod_allocator if alone else None
            allocation = None
            if allocator is not None:
                allocation = await self._context.call("pod_allocator", lambda: allocator.allocate(ids, self.devices))
            if allocation is None:
                allocation = await self._current_allocation(ids)
            self._check_mounts(allocation)
            self._check_unclaimed(ids)
            self._calls.record_allocation(ids)
            return allocation

    async def preferred_allocation(
        self, available: Sequence[str], must_include: Sequence[str], size: int, *, alone: bool = True
    ) -> Sequence[str]:
        """The plugin's choice of IDs; IDs that are not listed are ignored."""
        plugin = self._context.plugin
        if not self.prefers:
            raise AllocationError(f"{self.resource}: this plugin has no preferred allocation")
        if self._context.pod_allocator is not None:
            with self._calls.record_call(frozenset(available)):
                if not alone:
                    return ()
                allocator = self._context.pod_allocator
                return await self._context.call(
                    "pod_allocator", lambda: allocator.preferred_allocation(available, must_include, size)
                )
        offered, required = set(available), set(must_include)
        devices = self.devices()
        free = offered | required
        in_use = Counter(device.unit for device in devices.values() if device.healthy and device.id not in free)
        with self._calls.record_call(offered):
            candidates = [device for id_, device in devices.items() if id_ in offered]
            needed = [device for id_, device in devices.items() if id_ in required]
            try:
                found = await self._context.call(
                    "preferred_allocation", lambda: plugin.preferred_allocation(candidates, needed, size, in_use)
                )
            except ValueError as error:
                raise AllocationError(str(error)) from error
            chosen, problems = checked_choice(found, free)
            self._context.problems.update("preferred_allocation", problems)
            return chosen

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Runs the plugin's hook before a container starts."""
        if not self.pre_starts:
            raise AllocationError(f"{self.resource}: this plugin has no action before a container starts")
        plugin, devices = self._context.plugin, self._find(ids)
        await self._context.call("pre_start", lambda: plugin.pre_start(devices))

    def _check_unclaimed(self, ids: Sequence[str]) -> None:
        if self._context.units is not None:
            self._context.units.check_unclaimed(self.resource.rpartition("/")[2], ids)

    async def _current_allocation(self, ids: Sequence[str]) -> Allocation:
        """Of the devices as they are listed afterwards: another device may get one of the IDs during the hooks."""
        devices, replaced = self._healthy(ids), ""
        for _attempt in range(_ATTEMPTS):
            listed = self.devices()
            allocation = await self._allocation(devices)
            if self.devices() is listed:
                return allocation
            earlier, devices = devices, self._healthy(ids)
            if devices == earlier:
                return allocation
            replaced = _format_ids([new.id for new, old in zip(devices, earlier, strict=True) if new != old])
        raise AllocationError(f"{self.resource}: device {replaced} was replaced during the call; create the pod again")

    async def device_allocation(self, devices: Sequence[Device]) -> Allocation:
        """What a container with these devices gets, whatever their health. Raises `AllocationError`."""
        allocation = await self._allocation(devices)
        self._check_mounts(allocation)
        return allocation

    async def _allocation(self, devices: Sequence[Device]) -> Allocation:
        plugin = self._context.plugin
        if plugin.overrides("allocate"):
            found = await self._context.call("allocate", lambda: plugin.allocate(devices))
            if found is not None:
                return checked_allocation("allocate", found)
        allocation = await self._with_cdi_files(devices, Allocation.of(devices))
        if plugin.overrides("post_allocate"):
            default = allocation
            found = await self._context.call("post_allocate", lambda: plugin.post_allocate(devices, default))
            allocation = checked_allocation("post_allocate", found)
        return allocation

    def _find(self, ids: Sequence[str]) -> list[Device]:
        devices = self.devices()
        try:
            return [devices[id_] for id_ in dict.fromkeys(ids)]
        except KeyError:
            unknown = [id_ for id_ in ids if id_ not in devices]
        raise AllocationError(f"{self.resource}: unknown device {_format_ids(unknown)} requested", "unknown-id")

    def _healthy(self, ids: Sequence[str]) -> list[Device]:
        devices = self._find(ids)
        unhealthy = [device for device in devices if not device.healthy]
        if unhealthy:
            shown = _format_ids([f"{device.id} ({device.reason or 'no reason given'})" for device in unhealthy])
            raise AllocationError(f"{self.resource}: unhealthy device {shown} requested", "unhealthy")
        return devices

    def _check_mounts(self, allocation: Allocation) -> None:
        """Raises `AllocationError` if the source of a mount below /dev no longer exists.

        Container runtimes create a missing mount source as a directory, which then blocks the name for the kernel.
        """
        root = self._context.settings.root.rstrip("/")
        for mount in allocation.mounts:
            path = mount.host_path
            if path.startswith("/dev/") and not os.path.lexists(root + path):
                raise AllocationError(f"{self.resource}: {path} does not exist, the device was removed")

    async def _with_cdi_files(self, devices: Iterable[Device], allocation: Allocation) -> Allocation:
        failed: set[str] = set()
        for device in devices:
            if device.cdi is None or device.cdi.qualified_name in failed or self._cdi.directory.is_current(device.cdi):
                continue
            try:
                await self._cdi.ensure(device.cdi)
            except CdiWriteError as error:
                if device.cdi.indispensable or not device.nodes:
                    raise AllocationError(f"{self.resource}: {error}", "cdi-error") from error
                log.warning("%s; the container gets its device without CDI", error)
                failed.add(device.cdi.qualified_name)
        if not failed:
            return allocation
        return replace(allocation, cdi_devices=[name for name in allocation.cdi_devices if name not in failed])


async def unit_allocation(context: PluginContext, cdi: CdiPublisher, devices: Iterable[Device]) -> Allocation:
    """What a container with these devices of a plugin gets, by its hooks. Raises `AllocationError`."""
    parts: list[Allocation] = []
    for resource, same in groupby(devices, key=lambda device: device.resource):
        name = f"{context.plugin.namespace}/{resource}"
        allocator = ResourceAllocator(name, context, cdi, CallRecord(), dict)
        parts.append(await allocator.device_allocation(list(same)))
    return Allocation(
        nodes=tuple(dict.fromkeys(node for part in parts for node in part.nodes)),
        mounts=tuple(dict.fromkeys(mount for part in parts for mount in part.mounts)),
        envs={name: value for part in parts for name, value in part.envs.items()},
        annotations={name: value for part in parts for name, value in part.annotations.items()},
        cdi_devices=tuple(dict.fromkeys(name for part in parts for name in part.cdi_devices)),
    )


def _format_ids(ids: Sequence[str]) -> str:
    shown = ", ".join(ascii(id_[:100]) for id_ in ids[:_MAX_SHOWN_IDS])
    return shown if len(ids) <= _MAX_SHOWN_IDS else f"{shown} and {len(ids) - _MAX_SHOWN_IDS} more"
