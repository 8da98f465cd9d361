"""Values fetched on demand: shared, cached, limited."""

import asyncio

import pytest
from waiting import until

from accelplane.fleet.ondemand import OnDemand


class Backend:
    def __init__(self) -> None:
        self.keys: list[str] = []
        self.running = 0
        self.most = 0
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def fetch(self, key: str) -> str:
        self.keys.append(key)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.release.wait()
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return key.upper()


async def test_concurrent_requests_share_one_fetch() -> None:
    backend = Backend()
    values = OnDemand(backend.fetch, max_age=60, at_once=4)
    asking = [asyncio.create_task(values.get("a")) for _ in range(3)]
    await until(lambda: backend.running == 1)
    asking[0].cancel()
    backend.release.set()
    assert await asyncio.gather(*asking[1:]) == ["A", "A"]
    assert await values.get("a") == "A"
    assert backend.keys == ["a"]


async def test_an_expired_value_is_fetched_again() -> None:
    backend = Backend()
    backend.release.set()
    values = OnDemand(backend.fetch, max_age=0, at_once=4)
    assert [await values.get("a"), await values.get("a")] == ["A", "A"]
    assert backend.keys == ["a", "a"]


async def test_concurrent_fetches_are_limited() -> None:
    backend = Backend()
    values = OnDemand(backend.fetch, max_age=60, at_once=2)
    asking = [asyncio.create_task(values.get(key)) for key in "abcdef"]
    await until(lambda: backend.running == 2)
    backend.release.set()
    assert await asyncio.gather(*asking) == list("ABCDEF")
    assert backend.most == 2


async def test_an_error_is_not_cached() -> None:
    backend = Backend()
    backend.release.set()
    backend.error = ValueError("x")
    values = OnDemand(backend.fetch, max_age=60, at_once=2)
    with pytest.raises(ValueError, match="x"):
        await values.get("a")
    backend.error = None
    assert await values.get("a") == "A"


async def test_close_cancels_running_fetches() -> None:
    backend = Backend()
    values = OnDemand(backend.fetch, max_age=60, at_once=2)
    asking = asyncio.create_task(values.get("a"))
    await until(lambda: backend.running == 1)
    await values.close()
    assert backend.running == 0
    with pytest.raises(asyncio.CancelledError):
        await asking
