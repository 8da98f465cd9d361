"""Controllers: who makes the cluster be what an object asks for.

A controller is one function, `reconcile(request)`. It is told which object to look at, and neither what happened nor
how often: it reads what there is, compares it with what should be, and changes what differs. It may be called at any
time, for objects that are gone too, and does nothing when there is nothing to do. For one object it never runs twice
at a time.

It returns None when all is as it should be, or `Result(requeue_after=…)` to be called again later. What it raises is
logged, and it is called again after a delay that doubles from 5 ms to 1000 s; after `TerminalError`, only when
something changes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

import msgspec

from accelplane.apiserver import ApiError, Conflict

from .cache import Cache, Subscriber
from .metrics import Metrics
from .objects import Object, Request, request_of
from .owners import owner_request
from .queue import QueueShutDown, WorkQueue

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)

RESYNC = 10 * 3600.0


class Result(msgspec.Struct, frozen=True):
    """What else a reconciliation wants: to be called again after so many seconds."""

    requeue_after: float


class TerminalError(Exception):
    """There is nothing that this controller can do about the object until something changes."""


Reconcile = Callable[[Request], Awaitable[Result | None]]


class _Source(Protocol):
    """A cache, of whatever it is."""

    def requests(self) -> list[Request]: ...


class Controller:
    """One `reconcile` and what it is called for. The name is for metrics: by custom, its kind's in lower case."""

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
        self._sources: list[_Source] = []
        self._replays: list[Callable[[], None]] = []
        self._runs = False
        self._metrics.max_workers.labels(name).set(workers)

    def for_object(self, cache: Cache[T], *, debounce: float = 0.0) -> "Controller":
        """Reconciles the objects of this cache: each when it changes, and all of them every ten hours.

        What changes beside the specification, as a status does, is looked at `debounce` seconds later: once, however
        often it changed meanwhile.
        """

        def changed(old: T | None, new: T | None) -> None:
            if (thing := new if new is not None else old) is not None:
                self.enqueue(request_of(thing), after=debounce if _same_generation(old, new) else 0.0)

        cache.subscribe(self._heard(changed))
        self._sources.append(cache)
        return self

    def owns(self, cache: Cache[T], owner: type[Object], *, debounce: float = 0.0) -> "Controller":
        """Reconciles the `owner` of an object of this cache when that object changes; `debounce` as in `for_object`."""

        def owners(thing: T) -> Iterable[Request]:
            request = owner_request(thing, owner)
            return () if request is None else (request,)

        return self.watches(cache, owners, debounce=debounce)

    def watches(
        self, cache: Cache[T], requests: Callable[[T], Iterable[Request]], *, debounce: float = 0.0
    ) -> "Controller":
        """Reconciles what `requests` says of an object of this cache, as it was and as it is, when it changes.

        `debounce` as with `for_object`.
        """

        def changed(old: T | None, new: T | None) -> None:
            delay = debounce if _same_generation(old, new) else 0.0
            for thing in (old, new):
                for request in () if thing is None else requests(thing):
                    self.enqueue(request, after=delay)

        def replay() -> None:
            for thing in cache:
                changed(None, thing)

        cache.subscribe(self._heard(changed))
        self._replays.append(replay)
        return self

    def enqueue(self, request: Request, *, after: float = 0.0) -> None:
        """Has one object reconciled, in so many seconds at the latest: once, however often that was asked for."""
        self._queue.add_after(request, after)

    async def run(self) -> None:
        """Reconciles until `stop`. Caches must be synced: what they do not hold is taken for absent."""
        self._runs = True
        for replay in self._replays:
            replay()
        self._enqueue_all()
        resync = asyncio.create_task(self._enqueue_all_again())
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._workers):
                    workers.create_task(self._work())
        finally:
            resync.cancel()

    def stop(self) -> None:
        """Begins nothing new; `run` returns when what was begun has ended."""
        self._queue.shut_down()

    def _heard(self, changed: Subscriber[T]) -> Subscriber[T]:
        def heard(old: T | None, new: T | None) -> None:
            # Who waits to lead would keep the keys of all that ever was; all that is gets looked at when he does.
            if self._runs:
                changed(old, new)

        return heard

    def _enqueue_all(self) -> None:
        # unreadable objects told nobody that they are there
        for cache in self._sources:
            for request in cache.requests():
                self._queue.add(request)

    async def _enqueue_all_again(self) -> None:
        while True:
            await asyncio.sleep(self._resync)
            self._enqueue_all()

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
                outcome = await self._reconcile_one(request)
            finally:
                active.dec()
                self._queue.done(request)
            self._metrics.reconcile_seconds.labels(self.name).observe(time.perf_counter() - started)
            self._metrics.reconciles.labels(self.name, outcome).inc()

    async def _reconcile_one(self, request: Request) -> str:
        try:
            result = await self._reconcile(request)
        except TerminalError as error:
            log.error("%s %s: %s", self.name, request, error)
            self._metrics.reconcile_errors.labels(self.name).inc()
            self._metrics.terminal_errors.labels(self.name).inc()
            self._queue.forget(request)
            return "error"
        except Exception as error:  # whatever it is: one object's trouble is not the others'
            self._metrics.reconcile_errors.labels(self.name).inc()
            delay = self._queue.add_rate_limited(request, at_least=getattr(error, "retry_after", 0.0))
            if isinstance(error, Conflict):
                log.info("%s %s: tries again: %s", self.name, request, error)
            else:
                trace = None if isinstance(error, ApiError) else error
                log.error("%s %s: tries again in %.3g s: %s", self.name, request, delay, error, exc_info=trace)
            return "error"
        self._queue.forget(request)
        if result is None:
            return "success"
        self._queue.add_after(request, result.requeue_after)
        return "requeue_after"


def _same_generation(old: Object | None, new: Object | None) -> bool:
    """Whether the API server counts the specification of both as the same; many kinds are not counted."""
    before, after = (each.metadata.generation if each is not None and each.metadata else None for each in (old, new))
    return before is not None and before == after
