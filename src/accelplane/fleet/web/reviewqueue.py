"""Turns for reviews of tokens that were not valid before.

Anyone can send such tokens, and many users can have the address of one proxy. The queue bounds the memory and the
requests to the API server that unknown tokens cause, and leaves places to tokens that may be valid.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from msgspec import Struct

from accelplane.apiserver import RateLimit

from .sessions import expiry


class QueueLimits(Struct, frozen=True, kw_only=True):
    """Limits of a queue. `places` are those of all clients, `share` those of one address.

    `doubtful` limits the places of one address for tokens that are no JSON web token or have expired: random text takes
    no places of the tokens that Kubernetes and OpenID providers issue. `rate` is the number of reviews a second.
    """

    places: int = 128
    share: int = 64
    doubtful: int = 32
    at_once: int = 4
    rate: float = 50.0


class ReviewQueue:
    """Admits requests to a review, in the order of their arrival."""

    def __init__(self, limits: QueueLimits = QueueLimits()) -> None:  # noqa: B008 - a frozen value
        self._limits = limits
        self._turn = asyncio.Semaphore(limits.at_once)
        self._rate = RateLimit(limits.rate, max(1, int(limits.rate)))
        self._by_source: Counter[bytes] = Counter()
        self._doubtful: Counter[bytes] = Counter()
        self.size = 0

    @asynccontextmanager
    async def turn(self, source: bytes, token: str) -> AsyncGenerator[bool]:
        """Waits for a turn. Yields False at once if there is no place for this token of this address."""
        doubtful = is_doubtful(token)
        if (
            self.size >= self._limits.places
            or self._by_source[source] >= self._limits.share
            or (doubtful and self._doubtful[source] >= self._limits.doubtful)
        ):
            yield False
            return
        self.size += 1
        counters = (self._by_source, self._doubtful) if doubtful else (self._by_source,)
        for counter in counters:
            counter[source] += 1
        try:
            async with self._turn:
                await self._rate.acquire()
                yield True
        finally:
            self.size -= 1
            for counter in counters:
                counter[source] -= 1
                if not counter[source]:
                    del counter[source]


def is_doubtful(token: str) -> bool:
    """Whether a token is no JSON web token that expires in the future. Its signature is not verified."""
    return expiry(token) <= time.time()
