"""The work queue: which objects are to be looked at, each at most once at a time.

A key that is added many times before it is taken is taken once. One that is added while it is worked on is taken
again afterwards, never beside. Failures bring a key back after a delay that doubles.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from .metrics import Metrics
from .objects import Request


class QueueShutDown(Exception):
    """There is no more work: the queue was closed."""


class WorkQueue:
    """Keys in the order in which they were added."""

    def __init__(
        self,
        name: str,
        *,
        metrics: Metrics | None = None,
        base_delay: float = 0.005,
        max_delay: float = 1000.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_delay = base_delay
        self.max_delay = max_delay
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._wanted: dict[Request, float] = {}  # since when
        self._working: dict[Request, float] = {}
        self._later: dict[Request, asyncio.TimerHandle] = {}
        self._failures: dict[Request, int] = {}
        self._changed = asyncio.Event()
        self._closed = False
        metrics = metrics or Metrics()
        self._adds = metrics.queue_adds.labels(name)
        self._retries = metrics.queue_retries.labels(name)
        self._queued = metrics.queue_seconds.labels(name)
        self._worked = metrics.work_seconds.labels(name)
        metrics.queue_depth.labels(name).set_function(lambda: len(self._waiting))
        metrics.unfinished.labels(name).set_function(lambda: sum(self._ages()))
        metrics.longest.labels(name).set_function(lambda: max(self._ages(), default=0.0))

    def add(self, key: Request) -> None:
        """Has the key looked at as soon as there is a worker for it."""
        if self._closed:
            return
        if (timer := self._later.pop(key, None)) is not None:
            timer.cancel()
        if key in self._wanted:
            return
        self._adds.inc()
        self._wanted[key] = self._clock()
        if key not in self._working:
            self._waiting.append(key)
            self._changed.set()

    def add_after(self, key: Request, delay: float) -> None:
        """The same after `delay` seconds, or sooner when that was asked for before."""
        if delay <= 0:
            self.add(key)
            return
        if self._closed or key in self._wanted:
            return
        loop = asyncio.get_running_loop()
        known = self._later.get(key)
        if known is not None and known.when() <= loop.time() + delay:
            return
        if known is not None:
            known.cancel()
        self._later[key] = loop.call_later(delay, self.add, key)

    def add_rate_limited(self, key: Request, *, at_least: float = 0.0) -> float:
        """Brings the key back after a delay that doubles with each failure until `forget`; returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._retries.inc()
        # beyond 2^60 a float would overflow some day
        delay = max(at_least, min(self.base_delay * 2 ** min(failures, 60), self.max_delay))
        self.add_after(key, delay)
        return delay

    def forget(self, key: Request) -> None:
        """Forgets the key's failures."""
        self._failures.pop(key, None)

    def num_requeues(self, key: Request) -> int:
        return self._failures.get(key, 0)

    async def get(self) -> Request:
        """The next key, which is nobody else's until `done`. Raises `QueueShutDown`."""
        while True:
            if self._closed:
                raise QueueShutDown
            if self._waiting:
                key = self._waiting.popleft()
                now = self._clock()
                self._queued.observe(now - self._wanted.pop(key))
                self._working[key] = now
                return key
            self._changed.clear()
            await self._changed.wait()

    def done(self, key: Request) -> None:
        """The work on a key has ended; if it was added meanwhile it is next in line."""
        self._worked.observe(self._clock() - self._working.pop(key))
        if key in self._wanted:
            self._waiting.append(key)
            self._changed.set()

    def shut_down(self) -> None:
        """Ends all `get`; what waits is dropped."""
        self._closed = True
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()
        self._changed.set()

    def _ages(self) -> list[float]:
        now = self._clock()
        return [now - since for since in self._working.values()]
