"""Blocking calls in separate threads.

One thread per call instead of a pool: an idle agent has no threads, and a call that blocks in the kernel (a device that
does not answer) delays neither other calls nor the exit of the process, because its thread is a daemon.
"""

import _thread
import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_END_TIMEOUT = 5.0


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread; returns or raises its result."""
    return await start_thread(work)


def start_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs `work` in a new thread; the future gets its result."""
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
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, result, failure)

    # `threading.Thread.start` blocks the loop until the new thread has run.
    _thread.start_new_thread(run, ())
    return outcome


class SerialThread:
    """Runs blocking functions in threads, at most one at a time.

    A thread cannot be cancelled: when `run` is cancelled the function continues, and the next `run` waits for its end.
    The owner calls `wait_idle` at its end.
    """

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, or raises its exception."""
        while self._running is not None and not self._running.done():
            await asyncio.wait((self._running,))
        running = self._running = start_thread(work)
        return await asyncio.shield(running)

    async def wait_idle(self, owner: str, seconds: float = _END_TIMEOUT) -> bool:
        """Waits until no function runs, at most `seconds`; returns whether none runs. Logs for `owner` if one does."""
        if self._running is None or self._running.done():
            return True
        await asyncio.wait((self._running,), timeout=seconds)
        ended = self._running.done()
        if not ended:
            log.warning("%s: a call blocks for more than %g s; its thread ends with the process", owner, seconds)
        return ended


def retrieve_exception(future: "asyncio.Future[T]") -> None:
    """A callback for futures whose caller may be cancelled before it awaits them: asyncio then logs no error."""
    if not future.cancelled():
        future.exception()
