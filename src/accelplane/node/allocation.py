"""Answers to the kubelet for one resource, from memory: the devices as last published, the plugin's hooks, CDI."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from accelplane.devices import Allocation, Device
from accelplane.kubelet.server import AllocationError
from accelplane.node.cdi import CdiDirectory, CdiWriteError
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

_SHOWN_IDS = 5


class ResourceAllocator:
    """The `Allocator` of one resource. `devices` and `plugin` are replaced as they change."""

    def __init__(self, resource: str, plugin: Plugin[Config], cdi: CdiDirectory) -> None:
        self.resource = resource
        self.plugin = plugin
        self.devices: Mapping[str, Device] = {}
        self._cdi = cdi

    @property
    def prefers(self) -> bool:
        return self.plugin.overrides("preferred_allocation")

    @property
    def pre_starts(self) -> bool:
        return self.plugin.overrides("pre_start")

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """What a container gets for `ids`, each counted once. Raises `AllocationError` for unknown or sick ones."""
        devices = self._known(ids)
        sick = [f"{device.id} ({device.reason or 'no reason given'})" for device in devices if not device.healthy]
        if sick:
            raise AllocationError(f"{self.resource}: unhealthy device {_listed(sick)} requested")
        if self.plugin.overrides("allocate"):
            allocation = await self.plugin.allocate(devices)
            if allocation is not None:
                return allocation
        allocation = self._with_cdi_files(devices, Allocation.of(devices))
        if self.plugin.overrides("post_allocate"):
            allocation = await self.plugin.post_allocate(devices, allocation)
        return allocation

    async def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """The plugin's choice. IDs of `available` and `must_include` that the resource doesn't have are ignored."""
        if not self.prefers:
            raise AllocationError(f"{self.resource}: this plugin has no preferred allocation")
        free, fixed = set(available), set(must_include)
        in_use = Counter(
            device.unit
            for id_, device in self.devices.items()
            if device.healthy and id_ not in free and id_ not in fixed
        )
        try:
            return await self.plugin.preferred_allocation(
                [device for id_, device in self.devices.items() if id_ in free],
                [device for id_, device in self.devices.items() if id_ in fixed],
                size,
                in_use,
            )
        except ValueError as error:
            raise AllocationError(str(error)) from error

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Runs the plugin's hook before a container starts."""
        if not self.pre_starts:
            raise AllocationError(f"{self.resource}: this plugin does nothing before a container starts")
        await self.plugin.pre_start(self._known(ids))

    def _known(self, ids: Sequence[str]) -> list[Device]:
        unknown = [id_ for id_ in ids if id_ not in self.devices]
        if unknown:
            raise AllocationError(f"{self.resource}: unknown device {_listed(unknown)} requested")
        return [self.devices[id_] for id_ in dict.fromkeys(ids)]

    def _with_cdi_files(self, devices: Iterable[Device], allocation: Allocation) -> Allocation:
        failed: set[str] = set()
        for device in devices:
            if device.cdi is None or device.cdi.qualified_name in failed:
                continue
            try:
                self._cdi.ensure(device.cdi)
            except CdiWriteError as error:
                if device.cdi.indispensable or not device.nodes:
                    raise AllocationError(f"{self.resource}: {error}") from error
                log.warning("%s; the container gets its device without CDI", error)
                failed.add(device.cdi.qualified_name)
        if not failed:
            return allocation
        return replace(allocation, cdi_devices=[name for name in allocation.cdi_devices if name not in failed])


def _listed(ids: Sequence[str]) -> str:
    shown = ", ".join(ascii(id_[:100]) for id_ in ids[:_SHOWN_IDS])
    return shown if len(ids) <= _SHOWN_IDS else f"{shown} and {len(ids) - _SHOWN_IDS} more"
