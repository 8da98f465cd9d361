"""Blocking calls of one owner, one after the other."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from accelplane.host.blocking import in_thread

T = TypeVar("T")


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
