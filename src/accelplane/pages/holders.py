"""Which containers hold which devices, for pages: read from the kubelet when a page is requested.

The kubelet's pod-resources API names pods and containers. While it does not answer, the last answer is used for a
minute, and then the checkpoint of the device manager, which has pod UIDs instead of names.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import Device
from accelplane.host.blocking import SerialThread
from accelplane.kubelet import checkpoint, podresources
from accelplane.kubelet.podresources import ClaimHolder, DeviceHolder
from accelplane.node.settings import Settings

# An answer is used again for this time, unless a container has got a device since.
_MAX_AGE = 10.0
# How long the last answer is shown while the kubelet does not answer.
_GRACE = 60.0
# Scrapes and waiting readers read the holders every 30 s.
_KEEP_CONNECTION = 40.0
# How long a page waits for the kubelet.
_READ_TIMEOUT = 2.0

Key = tuple[str, str, str, str]  # namespace, pod, container, resource


class Holders(Struct, frozen=True):
    """The containers that hold devices. `began` is the monotonic time of the reading.

    `stale` counts IDs that an ended pod was listed with as well: kubelets before 1.34 list ended pods. `since` is the
    Unix time at which a container got its IDs of a resource, or was first seen with them. `allocatable` is the number
    of healthy IDs of each resource that the kubelet knows, held ones included. `claims` are devices of dynamic resource
    allocation, which several containers can share.
    """

    rows: Sequence[DeviceHolder] = ()
    source: Literal["podresources", "checkpoint", "none"] = "none"
    began: float = 0.0
    stale: int = 0
    since: Mapping[Key, float] = {}
    allocatable: Mapping[str, int] = {}
    claims: Sequence[ClaimHolder] = ()


class HolderReader:
    """Reads the holders of all resources. `allocations` returns the number of Allocate calls answered so far."""

    def __init__(
        self,
        settings: Settings,
        allocations: Callable[[], int],
        *,
        allocated_at: Callable[[str, Iterable[str]], float | None] = lambda _resource, _ids: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allocated_at` returns the Unix time of the last Allocate call for IDs of a resource, None if unknown."""
        self._off = settings.metrics_holders == "off"
        self._kubelet = podresources.PodResources(settings.pod_resources_socket, keep=_KEEP_CONNECTION)
        self._directory = settings.sockets_dir
        self.allocations = allocations
        self._allocated_at = allocated_at
        self._since: Mapping[Key, float] = {}  # of the last answer of the kubelet
        self._clock = clock
        self._thread = SerialThread()
        self._running: asyncio.Task[None] | None = None
        # Of the running reading: the number of Allocate calls before it, and whether it has allocatable IDs.
        self._running_for = (-1, False)
        self.last = Holders()  # the last answer, which may be old
        self._counted = -1
        # When the numbers of allocatable IDs were requested last.
        self._allocatable_began = float("-inf")
        self.requests: Counter[tuple[str, str]] = Counter()

    async def read(self, max_age: float = _MAX_AGE, *, allocatable: bool = True) -> Holders:
        """The holders now, or up to `max_age` seconds ago if no container has got a device since. Never fails.

        Returns the last answer if the kubelet does not answer within two seconds. Without `allocatable` the numbers of
        allocatable IDs are those of an earlier answer.
        """
        if self._off:
            return self.last
        count = self.allocations()
        allocatable_age = self._clock() - self._allocatable_began if allocatable else 0.0
        if self._counted == count and self.last.source != "none" and max(self._age(), allocatable_age) < max_age:
            return self.last
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _READ_TIMEOUT
        while True:
            running, serves = self._shared_reading(count, allocatable=allocatable)
            # A caller that is cancelled does not end the reading of the others.
            await asyncio.wait((running,), timeout=max(0.0, deadline - loop.time()))
            if not running.done():
                if self.last.source == "podresources" and self._age() >= _GRACE:
                    self.last = Holders(began=self._clock())
                return self.last
            if serves:
                running.result()
                return self.last

    async def close(self) -> None:
        """Ends the reading and the connection, and waits for the thread that reads the checkpoint."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        await self._kubelet.close()
        await self._thread.wait_idle("holders")

    def _shared_reading(self, count: int, *, allocatable: bool) -> tuple[asyncio.Task[None], bool]:
        """The running reading, started if there is none, and whether it has what the caller needs.

        One that began before the last Allocate call, or without allocatable IDs, may lack that.
        """
        if self._running is None or self._running.done():
            self._running_for = count, allocatable
            self._running = asyncio.create_task(self._update(count, allocatable=allocatable))
        return self._running, self._running_for[0] == count and (self._running_for[1] or not allocatable)

    async def _update(self, count: int, *, allocatable: bool) -> None:
        self.last = await self._read(self._clock(), allocatable=allocatable)
        self._counted = count

    def _age(self) -> float:
        return self._clock() - self.last.began

    async def _read(self, began: float, *, allocatable: bool) -> Holders:
        if allocatable:
            self._allocatable_began = began
        try:
            rows, claims = await self._kubelet.list_holders()
        except podresources.PodResourcesError:
            self.requests["List", "error"] += 1
            if self.last.source == "podresources" and self._age() < _GRACE:
                return self.last
            return await self._from_checkpoint(began)
        self.requests["List", "ok"] += 1
        known = await self._allocatable() if allocatable else self.last.allocatable
        found = without_stale(Holders(rows, "podresources", began, allocatable=known, claims=claims))
        self._since = self._times(found)
        return replace(found, rows=tuple(sorted(found.rows, key=key_of)), since=self._since)

    def _times(self, found: Holders) -> Mapping[Key, float]:
        """Since when the holders have their devices, with the times that are known already."""
        now = time.time()
        # A kubelet that does not answer for a while changes no holder.
        times = {key: self._since.get(key, now) for key in map(key_of, found.claims)}
        for row in found.rows:
            key, allocated = key_of(row), self._allocated_at(row.resource, row.device_ids)
            known = self._since.get(key)
            # A later Allocate call was for a new pod of the same name.
            times[key] = max(known or 0.0, allocated or 0.0) or now
        return times

    async def _allocatable(self) -> Mapping[str, int]:
        try:
            found = await self._kubelet.allocatable()
        except podresources.PodResourcesError:
            self.requests["GetAllocatableResources", "error"] += 1
            return {}
        self.requests["GetAllocatableResources", "ok"] += 1
        return {resource: len(ids) for resource, ids in found.items()}

    async def _from_checkpoint(self, began: float) -> Holders:
        try:
            found = await self._thread.run(lambda: checkpoint.read_checkpoint(self._directory))
        except checkpoint.CheckpointError:
            found = None
        if found is None:
            return Holders(began=began)
        rows = [DeviceHolder("", "", holding.container, holding.resource, holding.ids) for holding in found.holdings]
        return Holders(rows, "checkpoint", began)


def key_of(row: DeviceHolder | ClaimHolder) -> Key:
    """What the time of a holder is noted under: for a claim with its driver in place of the resource."""
    return row.namespace, row.pod, row.container, row.resource if isinstance(row, DeviceHolder) else row.driver


def without_stale(holders: Holders) -> Holders:
    """The holders with each ID once: of two containers, the one later in the list has the ID."""
    owner: dict[tuple[str, str], int] = {}
    listed = 0
    for index, row in enumerate(holders.rows):
        listed += len(row.device_ids)
        owner.update(dict.fromkeys(((row.resource, id_) for id_ in row.device_ids), index))
    if listed == len(owner):
        return holders
    rows = [
        replace(row, device_ids=tuple(id_ for id_ in row.device_ids if owner[row.resource, id_] == index))
        for index, row in enumerate(holders.rows)
    ]
    return replace(holders, rows=[row for row in rows if row.device_ids], stale=listed - len(owner))


def claimed_units(
    claims: Iterable[ClaimHolder], units: Mapping[str | tuple[str, str, str], tuple[str, str]]
) -> Mapping[tuple[Key, tuple[str, str]], int]:
    """The number of claimed devices by holder, plugin and unit.

    `units` has CDI names, and devices by driver, pool and name. Devices that it lacks are of other drivers.
    """
    return Counter(
        (key_of(claim), unit)
        for claim in claims
        for unit in {units[key] for key in (*claim.cdi_names, _device_of(claim)) if key in units}
    )


def _device_of(claim: ClaimHolder) -> tuple[str, str, str]:
    return claim.driver, claim.pool, claim.device


def counts_by_unit(
    rows: Iterable[DeviceHolder], listed: Mapping[str, tuple[str, Mapping[str, Device]]]
) -> dict[tuple[Key, str], int]:
    """The number of IDs of the `listed` resources by container and unit, which is "" for IDs that are not listed."""
    return Counter(
        (key_of(row), devices[id_].unit if id_ in devices else "")
        for row in rows
        if row.resource in listed
        for devices in (listed[row.resource][1],)
        for id_ in row.device_ids
    )
