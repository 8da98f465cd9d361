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
        if isinstance(error, StopIteration):  # which a future cannot raise
            outcome.set_exception(RuntimeError(f"raised StopIteration: {error}"))
        elif error is not None:
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


class SerialThread:
    """Runs blocking functions in threads, at most one at a time.

    A thread cannot be cancelled: when `run` is cancelled the function goes on, and the next `run` waits for its end.
    """

    def __init__(self) -> None:
        self._running: asyncio.Task[None] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns and raises what it raises."""
        while self._running is not None and not self._running.done():
            await asyncio.wait((self._running,))
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(_resolve(result, work))
        try:
            return await asyncio.shield(result)
        finally:
            result.add_done_callback(retrieve_exception)

    async def wait_idle(self, seconds: float) -> bool:
        """Waits until no function runs, at most `seconds`; returns whether none runs."""
        if self._running is not None:
            await asyncio.wait((self._running,), timeout=seconds)
        return self._running is None or self._running.done()


async def _resolve(result: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    try:
        result.set_result(await in_thread(work))
    except Exception as error:  # noqa: BLE001 - raised by `run`
        result.set_exception(error)


def retrieve_exception(future: "asyncio.Future[T]") -> None:
    """A callback for futures whose caller may be cancelled before it awaits them: asyncio then logs no error."""
    if not future.cancelled():
        future.exception()
