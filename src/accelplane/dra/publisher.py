"""Publishes the pool of one driver as ResourceSlices, and repairs what others change.

Slices are written only while the kubelet has the driver registered: when it starts, it deletes all slices of its node,
possibly after the registration. They are not deleted when the agent ends. Before the first write, objects that the
server does not store prove which optional fields it preserves: without shared counters, a GPU and its tiles could be
allocated at the same time. The responses to writes prove it again, because API servers of a cluster may differ.

Facts: Kubernetes API `resource.k8s.io`, kubelet `cm/dra/plugin`.
"""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from accelplane.apiserver import (
    AlreadyExists,
    ApiError,
    ApiServer,
    Conflict,
    NotFound,
    StatusError,
    object_path,
    resource_path,
)
from accelplane.apiserver.clock import loop_time
from accelplane.dra import probe
from accelplane.dra.changelimit import ChangeLimit
from accelplane.dra.events import Reason
from accelplane.dra.model import Features, Pool, PoolDevice
from accelplane.dra.observedslices import ObservedSlices
from accelplane.dra.probe import GATES, Server
from accelplane.dra.resourceslice import OwnerReference, ResourceSlice, from_api, to_api
from accelplane.dra.slices import Plan, Target, plan
from accelplane.dra.slicewatch import SliceWatches
from accelplane.dra.validation import problems as violated_rules

log = logging.getLogger(__name__)

_FIRST_DELAY, _MAX_DELAY = 1.0, 60.0
_QUIET = 300.0  # without a repair, after which the next one has the first delay
_ROUNDING = 0.001
_FORBIDDEN, _INVALID = 403, 422
_DEVICE = re.compile(r"spec\.devices\[([0-9]{1,3})\]")
_ALL = Features(taints=True, counters=True, consumable=True)
_CONSEQUENCES = {
    "taints": "taints: unhealthy devices are left out",
    "counters": "shared counters: tiles are not published",
    "consumable": "consumable capacity: each share is a device",
}


class Pace:
    """The publications of all drivers of a node, of which one begins in `interval` seconds."""

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self._next = float("-inf")

    def delay(self) -> float:
        """The seconds until a publication may begin."""
        return _until(self._next)

    def record(self) -> None:
        self._next = loop_time() + self._interval


def _until(moment: float) -> float:
    """The seconds until a time. A timer may be early by the rounding of a sum."""
    seconds = moment - loop_time()
    return seconds if seconds > _ROUNDING else 0.0


class _Backoff:
    """Delays that double from 1 s to 60 s."""

    def __init__(self) -> None:
        self._delay = 0.0

    def next(self) -> float:
        self._delay = min(_MAX_DELAY, max(_FIRST_DELAY, 2 * self._delay))
        return self._delay

    def reset(self) -> None:
        self._delay = 0.0


class _Metadata(Struct):
    uid: str = ""


class _Node(Struct):
    metadata: _Metadata


class SlicePublisher:
    """The slices of `driver` on `node`. All calls come from the event loop.

    The publishers of a node share `pace` and `watches`. `always` publishes an empty slice for a driver without units.
    `on_event` gets the reason and the text of events.
    """

    def __init__(
        self,
        api: ApiServer,
        node: str,
        driver: str,
        *,
        pace: Pace | None = None,
        watches: SliceWatches | None = None,
        always: bool = False,
        on_event: Callable[[Reason, str], None] = lambda _reason, _text: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when `published` may have changed."""
        self._api = api
        self._node = node
        self._driver = driver
        self._pace = pace or Pace()
        self._watches = watches or SliceWatches(api, node)
        self._keep_empty = always
        self._on_event = on_event
        self._changed = changed
        self._make: Callable[[Features], Pool] | None = None
        self._ideal = Pool(driver=driver, name=node)  # with all features, at the last attempt
        self._server: Server | None = None
        self._features = Features()
        self._registered = False
        self._started = asyncio.Event()
        self._wake = asyncio.Event()
        self._owner: OwnerReference | None = None
        self._limit = ChangeLimit()
        self._rejected: dict[str, tuple[PoolDevice, str]] = {}
        self._failures, self._repairs = _Backoff(), _Backoff()
        self._error = ""
        self._retry_at = float("-inf")
        self._urgent = False
        self._written: Pool | None = None
        self._is_current = False
        self._repair_at: float | None = None
        self._repaired_at = float("-inf")
        self._logged: frozenset[str] = frozenset()

    @property
    def features(self) -> Features:
        """What the API server preserves, as far as it is known."""
        return self._features

    @property
    def units(self) -> Collection[str]:
        """The IDs of the units in the slices that were written last."""
        return self._limit.units

    @property
    def taints(self) -> Mapping[str, Sequence[str]]:
        """The taints of units in the slices that were written last, as `key=value:effect`."""
        devices = self._written.devices if self._written is not None else ()
        return {
            device.unit: [f"{taint.key}={taint.value}:{taint.effect}" for taint in device.taints]
            for device in devices
            if device.taints
        }

    @property
    def published(self) -> Collection[str] | None:
        """As `units`, None while a change of the pool is not written, and while it is not known whether one is.

        A unit that changed in the last 10 s stays until they are over.
        """
        return self._limit.units if self._is_current else None

    @property
    def problems(self) -> Sequence[str]:
        """What prevents the publication now, or of single devices: one line each."""
        return list(self._problems())

    @property
    def limitations(self) -> Sequence[str]:
        """What is published in another way, because the API server does not preserve fields: one line each."""
        return list(self._limitations())

    def set_pool(self, make: Callable[[Features], Pool]) -> None:
        """Publishes the result of `make`, which is called again whenever the features of the API server are others.

        Call it after each change of what `make` reads.
        """
        self._make = make
        self._is_current = False
        self._wake.set()

    def registered(self, is_registered: bool) -> None:
        """Called after each registration with the kubelet, and when the kubelet is gone."""
        self._registered = is_registered
        if is_registered:
            self._urgent, self._owner, self._retry_at = True, None, float("-inf")
            self._repairs.reset()  # the kubelet may delete slices after the registration
            self._started.set()
        self._wake.set()

    async def run(self) -> None:
        """Publishes until it is cancelled. Makes no request before the first registration."""
        backoff = _Backoff()
        while True:
            await self._started.wait()
            began = loop_time()
            try:
                await self._session()
            except ApiError as error:
                self._fail(error)
            except Exception as error:  # claims are prepared and unprepared also without slices
                log.exception("slices of %s", self._driver)
                self._is_current = False
                self._fail(ApiError(f"slices of {self._driver}", f"internal error: {type(error).__name__}: {error}"))
            if loop_time() - began > _MAX_DELAY:
                backoff.reset()
            # The agents of all nodes lose their watches at the same time. Not for cryptography.
            await asyncio.sleep(backoff.next() * random.uniform(0.5, 1))  # noqa: S311

    async def _session(self) -> None:
        """Publishes until the watch ends. Raises `ApiError`."""
        self._adopt(await probe.discover(self._api, self._node, self._driver))
        observed = ObservedSlices(self._api, self._path, self._node, self._driver, self._wake.set)
        async with self._watches.following(observed) as watch:
            while not watch.done():
                self._wake.clear()
                delay = await self._attempt(observed)
                wake = asyncio.create_task(self._wake.wait())
                await asyncio.wait((watch, wake), timeout=delay, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
            await watch

    @property
    def _path(self) -> str:
        return self._server.path if self._server is not None else ""

    def _adopt(self, server: Server) -> None:
        if self._server is None or self._server.release != server.release:
            self._rejected.clear()
        self._server, self._features, self._retry_at = server, server.features, float("-inf")

    async def _attempt(self, observed: ObservedSlices) -> float | None:
        """Publishes what is different. Returns the seconds until the next attempt, None if only a change needs one.

        Raises `ApiError` if the session has to start again.
        """
        if not self._registered or self._make is None or self._server is None:
            return None
        now = loop_time()
        if delay := _until(self._retry_at):
            return delay
        self._ideal = self._make(_ALL)
        try:
            return await self._publish(observed, self._make(self._features), self._server)
        except ApiError as error:
            if isinstance(error, StatusError) and error.code == _INVALID:
                # The API server may have another version now, with another place for counter sets.
                raise
            self._fail(error)
            self._retry_at = now + self._failures.next()
            if isinstance(error, (Conflict, AlreadyExists, NotFound)):
                # Another client wrote the slice, and the watch has not reported it yet.
                self._retry_at -= _FIRST_DELAY
                with contextlib.suppress(ApiError):
                    await observed.list()
            return _until(self._retry_at)

    async def _publish(self, observed: ObservedSlices, wanted: Pool, server: Server) -> float | None:
        """As `_attempt`. Raises `ApiError`."""
        now = loop_time()
        self._keep_empty = self._keep_empty or bool(wanted.devices)
        limited, due = self._limit.apply(wanted, now)
        if self._owner is None:
            self._owner = await self._read_owner()
        planned, complete = self._planned(observed, limited, server)
        if planned and not self._urgent:
            delay = max(self._repair_delay(complete, now), self._pace.delay())
            if delay > 0:
                return delay
        if planned and complete == self._written:
            # The node may be another object now, and then its slices are deleted again and again.
            self._owner, self._repaired_at = await self._read_owner(), now
            planned, complete = self._planned(observed, limited, server)
        if planned:
            self._pace.record()
            if not await self._write(observed, planned, limited, server):
                self._log_problems()
                return 0.0
        self._written, self._urgent, self._error, self._repair_at = complete, False, "", None
        before, self._is_current = self.published, not self._wake.is_set()  # the pool may have changed meanwhile
        self._limit.record(limited, now)
        if self.published not in (None, before):
            self._changed()
        self._failures.reset()
        self._log_problems()
        return None if due is None else _until(due)

    def _planned(self, observed: ObservedSlices, pool: Pool, server: Server) -> tuple[Plan, Pool]:
        """The writes, and the pool without devices that the API server does not accept. Raises `ApiError`."""
        target = Target(node=self._node, layout=server.layout, owner=self._owner)
        while True:
            accepted = self._accepted(pool)
            planned = plan(
                accepted, observed.present, target, generation=observed.generation, keep_empty=self._keep_empty
            )
            violated = [
                each
                for written in (*planned.updates, *planned.creates)
                for each in violated_rules(written, server.layout)
            ]
            if not violated:
                return planned, accepted
            if not self._reject(pool, {each.device: str(each) for each in violated}):
                raise ApiError(f"slices of {self._driver}", str(violated[0]))

    def _accepted(self, pool: Pool) -> Pool:
        devices = {device.name: device for device in pool.devices}
        self._rejected = {name: each for name, each in self._rejected.items() if devices.get(name) == each[0]}
        if not self._rejected:
            return pool
        kept = [device for name, device in devices.items() if name not in self._rejected]
        used = {name for device in kept for name in device.counters}
        return replace(pool, devices=kept, counter_sets={name: pool.counter_sets[name] for name in sorted(used)})

    def _reject(self, pool: Pool, causes: Mapping[str, str]) -> bool:
        """Leaves devices out until they change. Returns whether there are any among the names in `causes`."""
        found = {device.name: (device, causes[device.name]) for device in pool.devices if device.name in causes}
        for name, (_device, cause) in found.items():
            self._on_event("DeviceNotPublished", f"device {name} is not published: {cause}")
        self._rejected.update(found)
        return bool(found)

    def _repair_delay(self, pool: Pool, now: float) -> float:
        """The seconds until slices are written that another client changed, 0 if the pool itself has changed."""
        if pool != self._written:
            self._repair_at = None
            return 0.0
        if self._repair_at is None:
            if now - self._repaired_at > _QUIET:
                self._repairs.reset()
            self._repair_at = now + self._repairs.next()
        return _until(self._repair_at)

    async def _write(self, observed: ObservedSlices, planned: Plan, pool: Pool, server: Server) -> bool:
        """Returns whether the API server has accepted and preserved everything. Raises `ApiError`."""
        for each in planned.deletes:
            metadata = each.metadata
            conditions = {"uid": metadata.uid, "resourceVersion": metadata.resource_version}
            await self._api.delete(object_path(server.path, metadata.name), options={"preconditions": conditions})
            observed.record_deletion(each)
        for each in (*planned.updates, *planned.creates):
            body = to_api(each, server.version)
            try:
                if each.metadata.uid:
                    path = object_path(server.path, each.metadata.name)
                    received = await self._api.put(path, body, ResourceSlice)
                else:
                    received = await self._api.post(server.path, body, ResourceSlice)
            except StatusError as error:
                if error.code == _INVALID and self._reject_by_causes(pool, each, error):
                    return False
                raise
            written = from_api(received)
            observed.record(written)
            if not self._check_preserved(each, written):
                return False
        return True

    def _reject_by_causes(self, pool: Pool, sent: ResourceSlice, error: StatusError) -> bool:
        causes: dict[str, str] = {}
        devices = sent.spec.devices or ()
        for cause in error.causes:
            if (found := _DEVICE.match(cause.field)) and int(found[1]) < len(devices):
                causes[devices[int(found[1])].name] = f"{cause.field}: {cause.message}"
        return self._reject(pool, causes)

    def _check_preserved(self, sent: ResourceSlice, received: ResourceSlice) -> bool:
        """Whether the response has all optional fields of the request. Updates the features if not."""
        found = probe.preserved(sent, received)
        lost = {name: False for name in GATES if getattr(found, name) is False}
        if lost:
            # A device without its counters is in conflict with others now.
            self._features, self._urgent = replace(self._features, **lost), True
        return not lost

    async def _read_owner(self) -> OwnerReference:
        try:
            node = await self._api.get(resource_path("", "v1", "nodes", name=self._node), _Node)
        except NotFound:
            raise ApiError(f"node {self._node}", "not found, expected the node that owns the slices") from None
        return OwnerReference(api_version="v1", kind="Node", name=self._node, uid=node.metadata.uid, controller=True)

    def _problems(self) -> Iterator[str]:
        if self._error:
            yield self._error
        for name, (_device, cause) in self._rejected.items():
            yield f"device {name} is not published: {cause}"

    def _limitations(self) -> Iterator[str]:
        wanted = {
            "taints": any(device.taints for device in self._ideal.devices),
            "counters": bool(self._ideal.counter_sets),
            "consumable": any(device.multiple for device in self._ideal.devices),
        }
        for name, consequence in _CONSEQUENCES.items():
            if wanted[name] and getattr(self._features, name) is False:
                yield f"the API server does not preserve {consequence}; enable the feature gate {GATES[name]}"

    def _fail(self, error: ApiError) -> None:
        self._error = str(error)
        self._log_problems()
        if isinstance(error, StatusError) and error.code in (_FORBIDDEN, _INVALID):
            self._on_event("SlicesNotWritten", self._error)

    def _log_problems(self) -> None:
        found = [*self._limitations(), *self._problems()]
        for problem in found:
            if problem not in self._logged:
                log.warning("slices of %s: %s", self._driver, problem)
        if self._logged and not found:
            log.info("slices of %s: published without problems", self._driver)
        self._logged = frozenset(found)
