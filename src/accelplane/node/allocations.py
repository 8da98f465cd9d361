"""Which device IDs containers hold, and which IDs must stay listed for that reason.

A kubelet crashes when an ID leaves the list while a container holds it or a call names it (docs/kubelet-defects.md).
What counts is the device manager's own record. Its checkpoint file has it, but may still name pods that have ended. The
pod-resources API names running pods only, and none at all while a restarted kubelet does not know its pods yet. So an
ID is free when neither source names it. Where neither can be read, the record of answered Allocate calls decides.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

from accelplane.host.blocking import SerialThread, ThreadLimitError
from accelplane.kubelet import checkpoint, podresources, sockets
from accelplane.logs import v
from accelplane.node.settings import Settings

log = logging.getLogger(__name__)

# The kubelet records an allocation as soon as it has received the answer, but writes the checkpoint when all resources
# of the container are allocated, which may take as long as another plugin does.
_RECORDING_TIME, _CHECKPOINT_TIME = 3.0, 120.0
# A kubelet that has answered for this time has got its pods from the API server.
_PODS_KNOWN_TIME = 120.0
_MAX_TIMES = 4096

Key = tuple[str, str]  # qualified resource name, device ID


class Reading(Struct, frozen=True):
    """The IDs that containers hold, each with its NUMA nodes, from a reading that began at the monotonic time `began`.

    `record` is `absent` where there is neither a socket nor a checkpoint (no kubelet has run yet), `unreadable` where
    there is one and it cannot be read. `answered`: whether the kubelet itself has answered. `ended` are IDs that only
    the checkpoint names: of pods that have ended, that a restarted kubelet does not know yet, or of all pods if it does
    not answer. `holders` are the containers, `namespace/pod/container`, that the kubelet names.
    """

    began: float
    record: Literal["read", "absent", "unreadable"]
    answered: bool = False
    held: Mapping[Key, Sequence[int]] = {}
    ended: frozenset[Key] = frozenset()
    holders: Mapping[Key, Sequence[str]] = {}


class AllocationReader:
    """Reads allocations for all plugins of the agent, one reading of each kind at a time."""

    def __init__(self, settings: Settings) -> None:
        self._socket = settings.pod_resources_socket
        self._directory = settings.sockets_dir
        self._thread = SerialThread()
        # A reading of the checkpoint does not wait for a kubelet that hangs.
        self._kubelet_lock, self._checkpoint_lock = asyncio.Lock(), asyncio.Lock()
        self._last: Reading | None = None
        # Since when the kubelet behind this socket has named no pods, without a failure in between.
        self._no_pods: tuple[sockets.Identity, float] | None = None
        self._holders: Mapping[Key, Sequence[str]] = {}  # of the last answer

    async def read(self, since: float, *, ask_kubelet: bool = True) -> Reading:
        """A reading that began after the monotonic time `since`; several callers may get the same one.

        Without `ask_kubelet` it is only the checkpoint, which does not wait for the kubelet.
        """
        async with self._kubelet_lock if ask_kubelet else self._checkpoint_lock:
            last = self._last
            if last is None or last.began <= since or (ask_kubelet and not last.answered):
                last = self._last = await self._read(ask_kubelet=ask_kubelet)
            return last

    async def close(self) -> None:
        """Waits for the thread that reads the checkpoint."""
        await self._thread.wait_idle("allocations")

    async def _read(self, *, ask_kubelet: bool) -> Reading:
        began = time.monotonic()
        running = await self._from_pod_resources() if ask_kubelet else None
        answered = running is not None
        try:
            recorded = await self._thread.run(self._from_checkpoint)
        except (checkpoint.CheckpointError, ThreadLimitError) as error:
            log.log(v(2), "allocations: %s", error)
            if not running and not self._has_no_pods(began):  # a restarted kubelet names no pods at first
                return Reading(began, "unreadable", answered)
            recorded = None
        if running is None and recorded is None:
            return Reading(began, "absent")
        running, recorded = running or {}, recorded or {}
        # Where the kubelet does not answer, the checkpoint is all there is, and may be outdated too.
        ended = frozenset(recorded.keys() - running.keys())
        return Reading(began, "read", answered, {**recorded, **running}, ended, self._holders if answered else {})

    def _has_no_pods(self, now: float) -> bool:
        """Whether the kubelet has named no pods for so long that it knows its pods."""
        return self._no_pods is not None and now - self._no_pods[1] >= _PODS_KNOWN_TIME

    async def _from_pod_resources(self) -> Mapping[Key, Sequence[int]] | None:
        began, identity = time.monotonic(), sockets.identity(self._socket)
        before, self._no_pods = self._no_pods, None
        if identity is None:
            return None
        try:
            held = await podresources.PodResources(self._socket).list_holders()
        except podresources.PodResourcesError as error:
            log.log(v(2), "allocations: %s", error)
            return None
        if not held.devices:
            self._no_pods = before if before is not None and before[0] == identity else (identity, began)
        holders: dict[Key, list[str]] = {}
        for one in held.devices:
            for id_ in one.device_ids:
                holders.setdefault((one.resource, id_), []).append(f"{one.namespace}/{one.pod}/{one.container}")
        self._holders = holders
        return {(one.resource, id_): one.numa_nodes.get(id_, ()) for one in held.devices for id_ in one.device_ids}

    def _from_checkpoint(self) -> Mapping[Key, Sequence[int]] | None:
        if (recorded := checkpoint.read_checkpoint(self._directory)) is None:
            return None
        return {(one.resource, id_): one.numa_nodes(id_) for one in recorded.holdings for id_ in one.ids}


class CallRecord:
    """The IDs that the kubelet's calls about one resource name, and those that Allocate was answered for."""

    def __init__(self) -> None:
        self._unanswered: dict[object, Collection[str]] = {}
        self._allocated: dict[str, float] = {}
        self._times: dict[str, float] = {}

    @contextmanager
    def record_call(self, ids: Collection[str]) -> Generator[None]:
        """For the duration of a call that names `ids`."""
        call = object()
        self._unanswered[call] = ids
        try:
            yield
        finally:
            del self._unanswered[call]

    def record_allocation(self, ids: Collection[str]) -> None:
        """Records an Allocate call that is being answered."""
        self._allocated.update(dict.fromkeys(ids, time.monotonic()))
        now = time.time()
        for id_ in ids:
            self._times.pop(id_, None)
            self._times[id_] = now
        while len(self._times) > _MAX_TIMES:
            del self._times[next(iter(self._times))]

    def allocated_at(self, ids: Iterable[str]) -> float | None:
        """The Unix time of the last Allocate call for one of the IDs, None if it is not known."""
        return max((self._times[id_] for id_ in ids if id_ in self._times), default=None)

    def must_stay(self, resource: str, id_: str, listed_since: float, reading: Reading | None) -> bool:
        """Whether an ID that has been listed as Unhealthy since `listed_since` has to stay in the list."""
        if any(id_ in ids for ids in self._unanswered.values()):
            return True
        if reading is None or reading.began <= listed_since:
            return True  # a container may have got it just before
        allocated = self._allocated.get(id_)
        if (resource, id_) in reading.held:
            if allocated is not None and allocated < reading.began:
                self._allocated[id_] = 0.0  # the kubelet has recorded the allocation: no need to wait for that
            return True
        if reading.record == "read":
            time_limit = _RECORDING_TIME if reading.answered else _CHECKPOINT_TIME
            return allocated is not None and reading.began - allocated < time_limit
        return reading.record == "unreadable" or allocated is not None

    def forget(self, id_: str) -> None:
        """Forgets an ID that has left the list."""
        self._allocated.pop(id_, None)
        self._times.pop(id_, None)
