"""Supervision of tasks: every task has one owner, which ends it and notices when it ends by itself.

`asyncio.TaskGroup` is not used here. It does not notice a task that returns or is cancelled, and in Python 3.11 it may
leave the task that entered it marked as cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

log = logging.getLogger(__name__)

R = TypeVar("R")


class UnexpectedCancellation(Exception):
    """A task was cancelled, but not by its owner."""


async def run_isolated(awaitable: Awaitable[R]) -> R:
    """Awaits in a separate task, which has ended when this function returns or raises.

    A `CancelledError` from here means that the caller is cancelled. One that leaks out of `awaitable` becomes
    `UnexpectedCancellation`.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait((task,))
    finally:
        await cancel(task)
    return result_of(task)


def result_of(task: asyncio.Task[R]) -> R:
    """Returns the result of a task that has ended. Raises its exception, or `UnexpectedCancellation`."""
    if task.cancelled():
        raise UnexpectedCancellation(f"{task.get_name()}: cancelled, but not by its owner")
    return task.result()


async def cancel(*tasks: asyncio.Task[object]) -> None:
    """Cancels tasks and waits until all have ended, also if the caller is cancelled meanwhile.

    No task is cancelled twice: that would interrupt the cleanup that the first cancellation started.
    """
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in pending):
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in pending:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: failed while it was cancelled", task.get_name(), exc_info=error)
    if cancelled is not None:
        raise cancelled


class Supervisor:
    """Tasks that run until they are cancelled. `wait` raises as soon as one of them ends by itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()

    def start(self, name: str, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Starts a task in the context of the caller."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def wait(self) -> None:
        """Waits for the first task that ends by itself. Raises its exception, or `RuntimeError` if it returned."""
        task = await asyncio.shield(self._ended)
        result_of(task)
        raise RuntimeError(f"{task.get_name()}: returned, expected to run until the program ends")

    async def cancel(self, *tasks: asyncio.Task[None]) -> None:
        """Cancels tasks and waits for their end."""
        self._tasks.difference_update(tasks)
        await cancel(*tasks)

    async def cancel_all(self) -> None:
        """Cancels all tasks, also those that they start meanwhile, and waits for their end."""
        while self._tasks:
            await self.cancel(*self._tasks)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task in self._tasks and not self._ended.done():
            self._ended.set_result(task)
