"""The FPGA part of a program: webhooks, and the statuses and Events of AcceleratorFunctions and FpgaRegions.

    hooks = add_fpga_admission(manager)     # the webhooks; also adds the controllers of statuses and Events

Admission needs only the two kinds. Statuses, numbers of nodes and Events need rights and definitions that older
installations do not have. Forbidden requests are logged once and retried every few minutes, because a change of a
role causes no notification.

Nodes and pods are watched after the first object exists, because most clusters have no FPGAs. Statuses are written by
server-side apply with the resource version that was read: of several replicas, one writes the status and its Event.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from http import HTTPStatus
from typing import Generic, TypeVar

from prometheus_client import Gauge

from accelplane.admission import fpga
from accelplane.admission.fpga_allocatable import AllocatableByResource
from accelplane.admission.mapping_status import MappingStatus, current_status, status_before, status_of
from accelplane.admission.mappings import (
    AcceleratorFunction,
    Fault,
    FpgaRegion,
    Mappings,
    checker,
    fault_of,
    remove_metadata,
    target_of,
)
from accelplane.admission.pending import PendingPods
from accelplane.apiserver import NotFound, StatusError
from accelplane.fpga.ids import IdError, Naming
from accelplane.kube.admission import Hook
from accelplane.kube.cache import Cache, UnreadableObject
from accelplane.kube.controller import Result
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, api_of, request_of
from accelplane.kube.status import apply_status

log = logging.getLogger(__name__)

M = TypeVar("M", AcceleratorFunction, FpgaRegion)
Other = TypeVar("Other", AcceleratorFunction, FpgaRegion)

_FORBIDDEN_RETRY = 300.0
_RESOURCE = "resource"
# A thousand plugins may start one after the other, and each one changes the number of nodes.
_DEBOUNCE = 2.0
_NOT_FOUND_RETRY = 1.0


def add_fpga_admission(
    manager: Manager, naming: Naming = "default", *, retry: float = _FORBIDDEN_RETRY, grace: float = 10.0
) -> list[Hook]:
    """Returns the webhooks for pods and mappings, and adds the controllers of statuses and Events to the manager.

    Forbidden requests are retried after `retry` seconds. A pod is checked after it was Pending for `grace` seconds.
    """
    mappings = Mappings(
        manager.cache(AcceleratorFunction, transform=remove_metadata, optional=True),
        manager.cache(FpgaRegion, transform=remove_metadata, optional=True),
        naming,
    )
    allocatable = AllocatableByResource(manager.client, manager.watch_timeouts, retry=retry)
    StatusController(manager, mappings.functions, mappings, allocatable, retry=retry).watches(mappings.regions)
    StatusController(manager, mappings.regions, mappings, allocatable, retry=retry).watches(mappings.functions)
    pods = PendingPods(manager, mappings, allocatable, retry=retry, grace=grace)
    first_object = asyncio.Event()
    for work in (allocatable.run, pods.run):
        manager.add_runnable(_after(first_object, work), leader_only=True)

    def changed(_old: AcceleratorFunction | FpgaRegion | None, new: AcceleratorFunction | FpgaRegion | None) -> None:
        if new is not None:
            first_object.set()

    mappings.functions.subscribe(changed)
    mappings.regions.subscribe(changed)
    _count(manager, mappings)

    def complete() -> bool:
        return mappings.functions.synced.is_set() and mappings.regions.synced.is_set()

    return [fpga.mutator(mappings.of, complete), checker(naming)]


def _after(
    first_object: asyncio.Event, work: Callable[[], Coroutine[object, object, None]]
) -> Callable[[], Coroutine[object, object, None]]:
    async def run() -> None:
        await first_object.wait()
        await work()

    return run


def _count(manager: Manager, mappings: Mappings) -> None:
    gauge = Gauge(
        "accelplane_fpga_mappings", "AcceleratorFunctions and FpgaRegions", ["kind", "state"],
        registry=manager.metrics.registry,
    )  # fmt: skip

    def counting(cache: Iterable[AcceleratorFunction | FpgaRegion], *, faulty: bool) -> Callable[[], float]:
        def count() -> float:
            faults = (fault_of(each, mappings.of(each.metadata.namespace or "")) for each in cache)
            return sum((fault is not None) == faulty for fault in faults)

        return count

    for kind, cache in (("AcceleratorFunction", mappings.functions), ("FpgaRegion", mappings.regions)):
        gauge.labels(kind, "accepted").set_function(counting(cache, faulty=False))
        gauge.labels(kind, "faulty").set_function(counting(cache, faulty=True))


class StatusController(Generic[M]):
    """Writes the statuses of one kind, and records an Event for each object that is not accepted."""

    def __init__(
        self, manager: Manager, cache: Cache[M], mappings: Mappings, allocatable: AllocatableByResource, *, retry: float
    ) -> None:
        self._client = manager.client
        self._events = manager.events
        self._cache = cache
        self._mappings = mappings
        self._allocatable = allocatable
        self._retry = retry
        self._forbidden_until = 0.0
        self._not_found: dict[Request, str | None] = {}
        self._reported_faults: dict[Request, Fault] = {}
        self._reported_errors: dict[Request, str] = {}
        self._kind = api_of(cache.kind).resource.kind
        self._controller = manager.controller(self._kind.lower(), self.reconcile).for_object(cache)
        cache.add_index(_RESOURCE, self._resource)
        allocatable.subscribe(self._allocatable_changed)

    def watches(self, others: Cache[Other]) -> None:
        """Also reconciles an object when an object of the other kind with the same name is created or deleted."""
        self._controller.watches(others, lambda each: [request_of(each)])

    async def reconcile(self, request: Request) -> Result | None:
        """Writes the status of one object if it changed."""
        if not self._allocatable.initialized.is_set():
            return None  # notified when they are known
        try:
            thing = self._cache.get(request)
        except UnreadableObject:
            thing = None
        if thing is None or thing.metadata.deletionTimestamp:
            for memory in (self._not_found, self._reported_faults, self._reported_errors):
                memory.pop(request, None)
            return None
        before = status_before(thing)
        new = status_of(thing, self._mappings.of(request.namespace), self._allocatable.counts)
        result = await self._write(thing, new) if new != before else None
        fault = new.fault
        if fault is None:
            self._reported_faults.pop(request, None)
        elif fault != before.fault and self._reported_faults.get(request) != fault:
            self._events.record(thing, "Warning", fault.reason, fault.text)
            self._reported_faults[request] = fault
        return result

    async def _write(self, thing: M, new: MappingStatus) -> Result | None:
        """Raises `ApiError` if a retry may succeed."""
        request = request_of(thing)
        if (rest := self._forbidden_until - time.monotonic()) > 0:
            return Result(requeue_after=rest)
        try:
            await apply_status(self._client, thing, new, current_status(thing), if_unchanged=True)
        except StatusError as error:
            if not error.permanent:
                raise
            return self._on_rejected(thing, error)
        self._forbidden_until = 0.0
        self._not_found.pop(request, None)
        self._reported_errors.pop(request, None)
        return None

    def _on_rejected(self, thing: M, error: StatusError) -> Result | None:
        request, version = request_of(thing), thing.metadata.resourceVersion
        if isinstance(error, NotFound) and self._not_found.get(request) != version:
            # It is probably deleted, and the event has not arrived yet.
            self._not_found[request] = version
            return Result(requeue_after=_NOT_FOUND_RETRY)
        if isinstance(error, NotFound) or error.code == HTTPStatus.FORBIDDEN:
            log.log(
                logging.DEBUG if self._forbidden_until else logging.WARNING,
                "status of %s objects not written: the account may not write it, or the definition has none: %s",
                self._kind, error,
            )  # fmt: skip
            self._forbidden_until = time.monotonic() + self._retry
            return Result(requeue_after=self._retry)
        if self._reported_errors.get(request) != str(error):
            log.warning("%s %s: status not written: %s", self._kind, request, error)
            self._reported_errors[request] = str(error)
        return None

    def _resource(self, thing: M) -> Iterator[str]:
        try:
            yield target_of(thing, self._mappings.naming).resource
        except IdError:
            return

    def _allocatable_changed(self, resources: Iterable[str] | None) -> None:
        if resources is None:
            found = self._cache.requests()
        else:
            found = [request_of(each) for name in resources for each in self._cache.by_index(_RESOURCE, name)]
        for request in found:
            self._controller.enqueue(request, after=0.0 if resources is None else _DEBOUNCE)
