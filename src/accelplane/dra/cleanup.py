"""Claims that are undone although the kubelet does not ask for it: those without pods, and those whose undo failed.

The kubelet repeats a failed Unprepare only as long as it knows the claim. Without a repetition here, a unit whose undo
failed after a conflict, a crash or the loss of the kubelet's state would be lost until the next start.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from accelplane.dra.claimtasks import ClaimTasks, Work, claim_lock, log_failure
from accelplane.dra.journal import Entry
from accelplane.dra.store import ClaimStore
from accelplane.dra.unusedclaims import UnusedClaims

RETRY_DELAY = 60.0
_LAST_RETRY = 600.0


class Cleanup:
    """Starts tasks of claims, with `delay` seconds before the first repetition. It then doubles up to 10 minutes."""

    def __init__(self, tasks: ClaimTasks, store: ClaimStore, unused: UnusedClaims, delay: float) -> None:
        self._tasks = tasks
        self._store = store
        self._unused = unused
        self._delay = delay
        self._running: dict[str, asyncio.Task[None]] = {}

    def remove_unused(self, work: Work) -> None:
        """Calls `work` for the prepared claims, again for those that are unused since."""
        self._start("removal of claims without pods", lambda: self._remove_unused(work))

    def repeat_failed(self, work: Work) -> None:
        """Calls `work` for claims whose undo has failed, until there are none."""
        self._start("undo of claims that has failed", lambda: self._repeat_failed(work))

    def stop(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _start(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = self._running.get(name)
        if not self._tasks.closed and (running is None or running.done()):
            self._running[name] = asyncio.create_task(run(), name=name)
            self._running[name].add_done_callback(log_failure)

    async def _remove_unused(self, work: Work) -> None:
        for delay in (0.0, self._unused.delay):
            await asyncio.sleep(delay)
            await self._call(work, lambda entry: entry.state == "prepared")
            if not self._unused.suspected:
                return

    async def _repeat_failed(self, work: Work) -> None:
        delay = self._delay
        while any(entry.error for entry in self._store.entries.values()):
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)
            await self._call(work, lambda entry: bool(entry.error))

    async def _call(self, work: Work, condition: Callable[[Entry], bool]) -> None:
        """Waits for a task of each claim: the end of the caller must not interrupt changes of the node."""
        for entry in list(self._store.entries.values()):
            if condition(entry) and not self._tasks.is_locked(claim_lock(entry.uid)):
                await asyncio.wait((self._tasks.start("restore", entry.ref, work),))
