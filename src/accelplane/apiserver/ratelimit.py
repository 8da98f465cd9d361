"""The rate limit of a client, as client-go's flowcontrol: a token bucket whose users wait in order."""

import asyncio
from collections.abc import Awaitable, Callable

from accelplane.apiserver.clock import loop_time

QPS = 20.0
BURST = 30


class RateLimit:
    """Allows bursts of `burst` requests, and `qps` per second on average. `clock` and `sleep` are for tests."""

    def __init__(
        self,
        qps: float = QPS,
        burst: int = BURST,
        *,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._qps = qps
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._tokens = float(burst)
        self._filled_at = float("-inf")

    async def acquire(self) -> None:
        """Returns when a request may be sent."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._qps)
        self._filled_at = now
        self._tokens -= 1
        if self._tokens >= 0:
            return
        try:
            await self._sleep(-self._tokens / self._qps)
        except BaseException:
            self._tokens += 1  # of a request that is cancelled
            raise
