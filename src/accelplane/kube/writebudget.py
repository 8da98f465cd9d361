"""A limit for the writes of a program against other programs that revert them, whatever they revert.

Two programs that both write an object write as fast as the API server answers. A `WriteBudget` has a token bucket for
each object: `BURST` writes at once, and another one after each `INTERVAL` seconds. That is at most ten in a minute,
also if the last permitted write was a pair.
"""

from collections.abc import Callable, Hashable

import msgspec

from accelplane.apiserver.clock import loop_time

BURST = 5
INTERVAL = 15.0
# A timer may be early by the rounding of a sum.
_ROUNDING = 0.001


class _Bucket(msgspec.Struct):
    tokens: float
    filled_at: float


class WriteBudget:
    """The writes of objects, by any key."""

    def __init__(self, *, clock: Callable[[], float] = loop_time) -> None:
        self._clock = clock
        self._buckets: dict[Hashable, _Bucket] = {}

    def delay(self, key: Hashable) -> float:
        """The seconds until the object may be written."""
        bucket = self._buckets.get(key)
        if bucket is None:
            return 0.0
        seconds = (1 - self._tokens(bucket)) * INTERVAL
        return seconds if seconds > _ROUNDING else 0.0

    def longest_delay(self) -> float:
        """The seconds until all objects may be written."""
        return max(map(self.delay, self._buckets), default=0.0)

    def record(self, key: Hashable, writes: int = 1) -> None:
        """Counts writes of an object."""
        self._buckets = {key: each for key, each in self._buckets.items() if self._tokens(each) < BURST}
        bucket = self._buckets.get(key)
        tokens = self._tokens(bucket) if bucket is not None else float(BURST)
        self._buckets[key] = _Bucket(tokens - writes, self._clock())

    def _tokens(self, bucket: _Bucket) -> float:
        return min(BURST, bucket.tokens + (self._clock() - bucket.filled_at) / INTERVAL)
