"""The work queue of a controller, with the semantics of client-go's rate-limiting queue.

A key that is added several times before a worker gets it is processed once. A key that is added while it is processed
is processed again afterwards, never concurrently. Failed keys return after a delay that doubles with each failure.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from .metrics import Metrics
from .objects import Request


class QueueShutDown(Exception):
    """The queue was shut down: there are no more keys."""


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
        self._ready: deque[Request] = deque()
        self._added_at: dict[Request, float] = {}
        self._processing: dict[Request, float] = {}
        self._delayed: dict[Request, asyncio.TimerHandle] = {}
        self._failures: dict[Request, int] = {}
        self._changed = asyncio.Event()
        self._shut_down = False
        metrics = metrics or Metrics()
        self._adds = metrics.queue_adds.labels(name)
        self._retries = metrics.queue_retries.labels(name)
        self._queue_seconds = metrics.queue_seconds.labels(name)
        self._work_seconds = metrics.work_seconds.labels(name)
        metrics.queue_depth.labels(name).set_function(lambda: len(self._ready))
        metrics.unfinished.labels(name).set_function(lambda: sum(self._processing_times()))
        metrics.longest.labels(name).set_function(lambda: max(self._processing_times(), default=0.0))

    def __len__(self) -> int:
        """Returns the number of keys that are ready, delayed or processed."""
        return len(self._added_at.keys() | self._delayed.keys() | self._processing.keys())

    def add(self, key: Request) -> None:
        """Makes a key ready. Does nothing after `shut_down`."""
        if self._shut_down:
            return
        if (timer := self._delayed.pop(key, None)) is not None:
            timer.cancel()
        if key in self._added_at:
            return
        self._adds.inc()
        self._added_at[key] = self._clock()
        if key not in self._processing:
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: Request, delay: float) -> None:
        """Makes a key ready after `delay` seconds, or when an earlier delay of the same key ends."""
        if self._shut_down or key in self._added_at:
            return
        if delay <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        timer = self._delayed.get(key)
        if timer is not None and timer.when() <= loop.time() + delay:
            return
        if timer is not None:
            timer.cancel()
        self._delayed[key] = loop.call_later(delay, self.add, key)

    def add_rate_limited(self, key: Request, *, at_least: float = 0.0) -> float:
        """Makes a failed key ready after a delay that doubles with each failure until `forget`. Returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._retries.inc()
        # 2 ** 1024 is not a float
        delay = max(at_least, min(self.base_delay * 2 ** min(failures, 60), self.max_delay))
        self.add_after(key, delay)
        return delay

    def forget(self, key: Request) -> None:
        """Resets the delay of a key."""
        self._failures.pop(key, None)

    async def get(self) -> Request:
        """Waits for the next key. No other worker gets it until `done`. Raises `QueueShutDown`."""
        while True:
            if self._shut_down:
                raise QueueShutDown
            if self._ready:
                key = self._ready.popleft()
                now = self._clock()
                self._queue_seconds.observe(now - self._added_at.pop(key))
                self._processing[key] = now
                return key
            self._changed.clear()
            await self._changed.wait()

    def done(self, key: Request) -> None:
        """Ends the processing of a key. If it was added meanwhile it becomes ready."""
        self._work_seconds.observe(self._clock() - self._processing.pop(key))
        if key in self._added_at:
            self._ready.append(key)
            self._changed.set()

    def shut_down(self) -> None:
        """Ends all `get`. Keys that are ready or delayed are dropped."""
        self._shut_down = True
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()
        self._changed.set()

    def _processing_times(self) -> list[float]:
        now = self._clock()
        return [now - since for since in self._processing.values()]
