"""Supervision of tasks: cancellation, and detection of tasks that end."""

import asyncio

import pytest

from accelplane.kube.tasks import Supervisor, UnexpectedCancellation, cancel, run_isolated


async def run_forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise OSError("the disk is full")


async def leak() -> None:
    raise asyncio.CancelledError


async def test_an_isolated_coroutine_returns_and_raises() -> None:
    async def answer() -> int:
        return 42

    assert await run_isolated(answer()) == 42
    with pytest.raises(OSError, match="the disk is full"):
        await run_isolated(fail())


async def test_a_leaked_cancellation_does_not_cancel_the_caller() -> None:
    with pytest.raises(UnexpectedCancellation, match="cancelled, but not by its owner"):
        await run_isolated(leak())


async def test_a_cancelled_caller_ends_the_isolated_task_first() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await run_forever()
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    caller = asyncio.create_task(run_isolated(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["cleaned up"]


async def test_cancel_waits_though_it_is_cancelled_and_interrupts_no_cleanup() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await run_forever()
        finally:
            await asyncio.sleep(0.02)
            steps.append("cleaned up")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(cancel(task))
    for _ in range(3):
        await asyncio.sleep(0.001)
        cancelling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelling
    assert steps == ["cleaned up"]
    assert task.cancelled()


async def test_an_exception_during_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        try:
            await run_forever()
        finally:
            await fail()

    task = asyncio.create_task(work(), name="worker")
    await asyncio.sleep(0)
    await cancel(task)
    assert "worker: failed while it was cancelled" in caplog.text


async def returns() -> None:
    return


async def test_the_end_of_a_supervised_task_is_an_error() -> None:
    for work, expected in ((returns, RuntimeError), (fail, OSError), (leak, UnexpectedCancellation)):
        tasks = Supervisor()
        tasks.start("first", run_forever())
        tasks.start("second", work())
        with pytest.raises(expected, match="disk is full" if work is fail else "second: "):
            await tasks.wait()
        await tasks.cancel_all()


async def test_a_task_that_its_supervisor_cancels_is_no_error() -> None:
    tasks = Supervisor()
    first, second = tasks.start("first", run_forever()), tasks.start("second", run_forever())
    waiting = asyncio.create_task(tasks.wait())
    await asyncio.sleep(0)
    await tasks.cancel(first)
    await asyncio.sleep(0)
    assert not waiting.done()
    await tasks.cancel_all()
    assert second.cancelled()
    await cancel(waiting)


async def test_cancel_all_ends_tasks_that_are_started_meanwhile() -> None:
    tasks = Supervisor()
    late: list[asyncio.Task[None]] = []

    async def work() -> None:
        try:
            await run_forever()
        finally:
            late.append(tasks.start("late", run_forever()))

    tasks.start("work", work())
    await asyncio.sleep(0)
    await tasks.cancel_all()
    assert [task.cancelled() for task in late] == [True]
