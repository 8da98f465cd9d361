"""The client-side rate limit, in virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import RateLimit


class VirtualTime:
    """A clock that a task advances by sleeping; one task at a time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_burst_passes_immediately_and_later_requests_at_the_rate() -> None:
    time = VirtualTime()
    limit = RateLimit(clock=time.clock, sleep=time.sleep)
    for _ in range(30):
        await limit.acquire()
    assert time.now == 1000
    for _ in range(40):
        await limit.acquire()
    assert time.now == pytest.approx(1002)


async def test_unused_requests_accumulate_up_to_the_burst() -> None:
    time = VirtualTime()
    limit = RateLimit(10, 5, clock=time.clock, sleep=time.sleep)
    for pause in (0, 3600):
        time.now += pause
        start = time.now
        for _ in range(5):
            await limit.acquire()
        assert time.now == start
        await limit.acquire()
        assert time.now == pytest.approx(start + 0.1)


@given(st.lists(st.floats(0, 1), max_size=100))
async def test_no_period_has_more_requests_than_burst_and_rate_allow(pauses: list[float]) -> None:
    time = VirtualTime()
    limit = RateLimit(20, 30, clock=time.clock, sleep=time.sleep)
    sent: list[float] = []
    for pause in pauses:
        time.now += pause
        await limit.acquire()
        sent.append(time.now)
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            assert last - first + 1 <= 31 + 20 * (sent[last] - sent[first])


async def test_waiting_requests_are_served_in_order_and_a_cancelled_one_uses_nothing() -> None:
    waits: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(seconds: float) -> None:
        waits.append((seconds, future := asyncio.get_running_loop().create_future()))
        await future

    limit = RateLimit(10, 1, clock=lambda: 0.0, sleep=sleep)
    await limit.acquire()
    tasks = [asyncio.create_task(limit.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    assert [seconds for seconds, _ in waits] == pytest.approx([0.1, 0.2, 0.3])
    tasks[2].cancel()
    await asyncio.gather(*tasks[2:], return_exceptions=True)
    tasks.append(asyncio.create_task(limit.acquire()))
    await asyncio.sleep(0)
    assert waits[3][0] == pytest.approx(0.3)
    for _, future in waits:
        if not future.done():
            future.set_result(None)
    await asyncio.gather(*tasks, return_exceptions=True)
