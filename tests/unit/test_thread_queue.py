"""Blocking functions of several owners in one thread."""

import _thread
import asyncio
import threading
from functools import partial

import pytest
from threadlimit import ThreadLimit
from waiting import until

from accelplane.host.blocking import ThreadQueue


async def test_functions_run_one_after_the_other_in_one_thread_that_ends() -> None:
    threads, queue = _thread._count(), ThreadQueue(stall_timeout=60)
    order: list[int] = []

    def work(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    found = await asyncio.gather(*(queue.submit(partial(work, number)) for number in range(9)))
    assert order == list(range(9))
    assert len(set(found)) == 1
    await until(lambda: _thread._count() == threads)
    assert await queue.submit(lambda: 7) == 7  # a new thread


async def test_a_function_that_blocks_delays_neither_earlier_nor_later_ones() -> None:
    queue, release = ThreadQueue(stall_timeout=0.01), threading.Event()
    first = queue.submit(lambda: 1)
    blocked = queue.submit(lambda: release.wait(60))
    later = [queue.submit(lambda n=n: n) for n in (2, 3)]
    async with asyncio.timeout(30):
        assert await asyncio.gather(first, *later) == [1, 2, 3]
        assert await queue.submit(lambda: 4) == 4
    assert not blocked.done()
    release.set()
    assert await blocked


async def test_all_functions_may_block_concurrently() -> None:
    queue, release = ThreadQueue(stall_timeout=0.01), threading.Event()
    entered = threading.Semaphore(0)

    def block() -> bool:
        entered.release()
        return release.wait(60)

    blocked = [queue.submit(block) for _ in range(3)]
    for _ in blocked:
        await until(lambda: entered.acquire(blocking=False))
    release.set()
    assert await asyncio.gather(*blocked) == [True] * 3


async def test_exceptions_are_those_of_the_function_and_affect_no_other_calls() -> None:
    queue = ThreadQueue()
    found = await asyncio.gather(
        queue.submit(lambda: 1 / 0),
        queue.submit(lambda: next(iter(()))),
        queue.submit(lambda: 5),
        return_exceptions=True,
    )
    assert [type(each) for each in found] == [ZeroDivisionError, RuntimeError, int]


async def test_a_function_without_waiters_is_not_called() -> None:
    queue, release = ThreadQueue(stall_timeout=60), threading.Event()
    calls: list[int] = []
    first = queue.submit(lambda: release.wait(60))
    second, third = queue.submit(lambda: calls.append(2)), queue.submit(lambda: calls.append(3))
    second.cancel()
    release.set()
    await asyncio.gather(first, third)
    assert calls == [3]
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_functions_wait_until_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ThreadLimit(monkeypatch, failures=3)
    queue = ThreadQueue(stall_timeout=0.01)
    waiting = [queue.submit(lambda n=n: n) for n in range(2)]
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == [0, 1]
    assert caplog.messages == ["blocking calls wait: can't start new thread; retrying"]


async def test_functions_behind_one_that_blocks_wait_until_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, release, entered = ThreadQueue(stall_timeout=0.01), threading.Event(), threading.Event()

    def block() -> bool:
        entered.set()
        return release.wait(60)

    blocked = queue.submit(block)
    await until(entered.is_set)
    limit = ThreadLimit(monkeypatch, failures=3)
    try:
        async with asyncio.timeout(60):
            assert await queue.submit(lambda: 1) == 1
        assert limit.failures == 0
    finally:
        release.set()
    assert await blocked
