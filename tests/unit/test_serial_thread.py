"""Blocking calls of one owner in one thread."""

import asyncio
import threading

import pytest

from accelplane.host.blocking import SerialThread, in_thread


async def test_calls_run_one_after_the_other_also_after_a_cancellation() -> None:
    thread, first, release = SerialThread(), threading.Event(), threading.Event()
    order: list[str] = []

    def block() -> None:
        first.set()
        release.wait(10)
        order.append("first")

    task = asyncio.create_task(thread.run(block))
    await in_thread(lambda: first.wait(10))
    task.cancel()
    await asyncio.wait((task,))
    second = asyncio.create_task(thread.run(lambda: order.append("second")))
    assert not await thread.wait_idle(0.01)
    assert order == []
    release.set()
    await second
    assert order == ["first", "second"]
    assert await thread.wait_idle(1)


async def test_results_and_exceptions_are_those_of_the_function() -> None:
    thread = SerialThread()
    assert await thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)


async def test_a_function_that_raises_stop_iteration_ends() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await in_thread(lambda: next(iter(())))
