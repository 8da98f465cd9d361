"""Blocking reads beside the event loop.

A thread for each piece of work instead of a pool: an idle agent has none, and one that hangs in the kernel (a device
that does not answer) is a daemon that holds neither the others nor the end of the process.
"""

import _thread
import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, computed in a thread of its own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
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
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
            loop.call_soon_threadsafe(settle, result, failure)

    # `threading` would have the loop wait until the new thread has had Python's interpreter lock.
    _thread.start_new_thread(run, ())
    return await outcome
