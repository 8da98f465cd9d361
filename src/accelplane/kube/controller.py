"""Controllers: each makes the cluster match the objects of one kind.

A controller is a function `reconcile(request)`. It gets the key of an object, not what happened to it: it reads the
current state, compares it with the desired state and changes what differs. It may be called at any time, also for an
object that does not exist any more, and does nothing if there is nothing to do. It never runs concurrently for the same
object.

It returns None, or `Result(requeue_after=…)` to be called again later. If it raises an exception, that is logged, and
it is called again after a delay that doubles from 5 ms to 1000 s; after `TerminalError`, only when something changes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TypeVar

import msgspec

from accelplane.apiserver.errors import ApiError, Conflict

from .cache import Cache, UnreadableObject
from .metrics import Metrics
from .objects import Object, Request, request_of
from .owners import owner_request
from .predicates import Predicate
from .queue import QueueShutDown, WorkQueue
from .tasks import cancel, result_of, run_isolated

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)

RESYNC = 10 * 3600.0


class Result(msgspec.Struct, frozen=True):
    """The result of a reconciliation that requests another one after `requeue_after` seconds."""

    requeue_after: float


class TerminalError(Exception):
    """An error that a retry cannot solve: the object is reconciled again when something changes."""


Reconcile = Callable[[Request], Awaitable[Result | None]]


class Controller:
    """One `reconcile` function and its triggers. `name` is for metrics: by convention, the kind in lower case."""

    def __init__(
        self,
        name: str,
        reconcile: Reconcile,
        *,
        workers: int = 1,
        resync: float = RESYNC,
        metrics: Metrics | None = None,
        base_delay: float = 0.005,
        max_delay: float = 1000.0,
    ) -> None:
        self.name = name
        self._metrics = metrics or Metrics()
        self._reconcile = reconcile
        self._workers = workers
        self._resync = resync
        self._queue = WorkQueue(name, metrics=self._metrics, base_delay=base_delay, max_delay=max_delay)
        self._objects: list[Callable[[], Iterable[Request]]] = []
        self._initial: list[Callable[[], Iterable[Request]]] = []
        self._synced: list[asyncio.Event] = []
        self._running = False
        self._metrics.max_workers.labels(name).set(workers)

    def for_object(
        self, cache: Cache[T], *, predicate: Predicate[T] | None = None, debounce: float = 0.0
    ) -> "Controller":
        """Reconciles the objects of this cache: each when it changes, and all every ten hours.

        Only changes that `predicate` accepts count; an object that exists at the start, or at a resync, is a creation.
        Unreadable objects are always reconciled. With `debounce`, updates that leave `metadata.generation` unchanged,
        such as a status, and all updates of kinds without generation, are reconciled once after that many seconds.
        """

        def requests() -> Iterable[Request]:
            yield from (request_of(thing) for thing in cache if predicate is None or predicate(None, thing))
            yield from cache.unreadable

        self._subscribe(cache, lambda thing: (request_of(thing),), predicate, debounce, on_unreadable=self.enqueue)
        self._objects.append(requests)
        return self

    def owns(
        self,
        cache: Cache[T],
        owner: type[Object],
        *,
        predicate: Predicate[T] | None = None,
        debounce: float = 0.0,
    ) -> "Controller":
        """Reconciles the controlling `owner` of an object of this cache when that object changes."""

        def owners(thing: T) -> Iterable[Request]:
            request = owner_request(thing, owner)
            return () if request is None else (request,)

        return self.watches(cache, owners, predicate=predicate, debounce=debounce)

    def watches(
        self,
        cache: Cache[T],
        requests: Callable[[T], Iterable[Request]],
        *,
        predicate: Predicate[T] | None = None,
        debounce: float = 0.0,
    ) -> "Controller":
        """Reconciles `requests(object)` for an object of this cache when it changes, for the old and the new state.

        `predicate` and `debounce` are as in `for_object`.
        """

        def initial() -> Iterable[Request]:
            return (
                request for thing in cache if predicate is None or predicate(None, thing) for request in requests(thing)
            )

        self._subscribe(cache, requests, predicate, debounce)
        self._initial.append(initial)
        return self

    def starts_with(self, request: Request) -> "Controller":
        """Reconciles this request when the controller starts, also if no object of that name exists."""
        self._initial.append(lambda: (request,))
        return self

    async def wait_for(self, caches: Collection[asyncio.Event]) -> None:
        """Waits until those of `caches` (their `synced`) are synced whose changes this controller reconciles."""
        for synced in self._synced:
            if synced in caches:
                await synced.wait()

    def enqueue(self, request: Request, *, after: float = 0.0) -> None:
        """Reconciles a request after at most `after` seconds: once, however often it is enqueued until then.

        Does nothing unless the controller runs. A replica that does not lead must not collect requests, and the
        controller reconciles everything when it starts.
        """
        if self._running:
            self._queue.add_after(request, after)

    async def run(self) -> None:
        """Reconciles until `stop`. All caches have to be synced.

        Raises `UnexpectedCancellation` if a worker is cancelled by anything but the cancellation of this function.
        """
        self._running = True
        tasks = [
            asyncio.create_task(self._work(), name=f"{self.name} worker {number}") for number in range(self._workers)
        ]
        resync = asyncio.create_task(self._resync_periodically(), name=f"{self.name} resync")
        try:
            for initial in self._initial:
                self._enqueue_all(initial())
            running = {*tasks, resync}
            while running - {resync}:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    result_of(task)
        finally:
            await cancel(*tasks, resync)
            self._running = False

    def stop(self) -> None:
        """Stops starting reconciliations. `run` returns when the running ones have ended."""
        self._queue.shut_down()

    def _subscribe(
        self,
        cache: Cache[T],
        requests: Callable[[T], Iterable[Request]],
        predicate: Predicate[T] | None,
        debounce: float,
        *,
        on_unreadable: Callable[[Request], None] | None = None,
    ) -> None:
        def changed(old: T | None, new: T | None) -> None:
            if not self._running or (predicate is not None and not predicate(old, new)):
                return
            delay = 0.0 if _is_urgent(old, new) else debounce
            for thing in (old, new):
                for request in () if thing is None else requests(thing):
                    self.enqueue(request, after=delay)

        cache.subscribe(changed, on_unreadable=on_unreadable)
        self._synced.append(cache.synced)

    def _enqueue_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue.add(request)

    async def _resync_periodically(self) -> None:
        while True:
            for requests in self._objects:
                self._enqueue_all(requests())
            await asyncio.sleep(self._resync)

    async def _work(self) -> None:
        active = self._metrics.active_workers.labels(self.name)
        while True:
            try:
                request = await self._queue.get()
            except QueueShutDown:
                return
            active.inc()
            started = time.perf_counter()
            try:
                result = await self._reconcile_one(request)
            finally:
                active.dec()
                self._queue.done(request)
            self._metrics.reconcile_seconds.labels(self.name).observe(time.perf_counter() - started)
            self._metrics.reconciles.labels(self.name, result).inc()

    async def _reconcile_one(self, request: Request) -> str:
        """Returns the label of the result, as in controller-runtime."""
        try:
            result = await run_isolated(self._reconcile(request))
        except TerminalError as error:
            log.error("%s %s: %s", self.name, request, error)
            self._metrics.reconcile_errors.labels(self.name).inc()
            self._metrics.terminal_errors.labels(self.name).inc()
            self._queue.forget(request)
            return "error"
        except Exception as error:  # the errors of one object must not affect the others
            self._metrics.reconcile_errors.labels(self.name).inc()
            delay = self._queue.add_rate_limited(request, at_least=getattr(error, "retry_after", 0.0))
            if isinstance(error, Conflict):
                log.info("%s %s: retrying: %s", self.name, request, error)
            else:
                trace = None if isinstance(error, ApiError | UnreadableObject) else error
                log.error("%s %s: retrying in %.3g s: %s", self.name, request, delay, error, exc_info=trace)
            return "error"
        self._queue.forget(request)
        if result is None:
            return "success"
        self._queue.add_after(request, result.requeue_after)
        return "requeue_after"


def _is_urgent(old: Object | None, new: Object | None) -> bool:
    """Returns whether a change is not debounced: a creation, a deletion, or a new generation."""
    if old is None or new is None:
        return True
    before, after = (each.metadata.generation if each.metadata else None for each in (old, new))
    return before != after
