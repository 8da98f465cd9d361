"""Blocking calls in threads of their own.

One thread per call instead of a pool: an idle agent has no threads, and a call that blocks in the kernel (a device that
does not answer) delays neither other calls nor the exit of the process, because its thread is a daemon.
"""

import _thread
import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread; returns or raises its result."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # pyright: ignore[reportArgumentType] - T where there is no error

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised by the await below
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, result, failure)

    # `threading.Thread.start` blocks the loop until the new thread has run.
    _thread.start_new_thread(run, ())
    return await outcome
