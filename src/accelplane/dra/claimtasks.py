"""Tasks and locks of claims: calls of the kubelet become tasks, which continue after the time limit of a call.

There is a lock for each claim and one for each physical unit, so a device that blocks delays no other one. A task that
has the lock of a claim waits for locks of units, never for the lock of another claim.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from accelplane.apiserver.clock import loop_time
from accelplane.devices import CdiError
from accelplane.dra.journal import JournalError
from accelplane.dra.model import ClaimError, ClaimRef, PreparedDevice, error_line
from accelplane.fpga import FpgaError
from accelplane.host import HostError
from accelplane.host.blocking import ThreadLimitError
from accelplane.kubelet.server import AllocationError

log = logging.getLogger(__name__)


# Errors of claims. Others are internal errors.
EXPECTED = (AllocationError, CdiError, ClaimError, FpgaError, HostError, JournalError, OSError, ThreadLimitError)

Devices: TypeAlias = Sequence[PreparedDevice]
Kind: TypeAlias = Literal["prepare", "unprepare", "restore"]
Work: TypeAlias = Callable[[ClaimRef], Awaitable[Devices]]


class _Progress(Struct):
    """What the task of a claim does, and the time of the loop at which it began."""

    since: float
    device: str = "the claim"
    activity: str = "after another call"


class ClaimTasks:
    """The tasks of one preparer. `changed` is called when a task has ended."""

    def __init__(self, time_limit: float, changed: Callable[[], None]) -> None:
        self._time_limit = time_limit
        self._changed = changed
        self._running: set[asyncio.Task[Devices]] = set()
        self._last: dict[str, tuple[Kind, asyncio.Task[Devices]]] = {}  # the task of each claim that ends last
        self._progress: dict[str, _Progress] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # with the number of their users
        self.closed = False

    async def answers(self, kind: Kind, claims: Sequence[ClaimRef], work: Work) -> dict[str, Devices | ClaimError]:
        """The results of `work` for the claims, by UID."""
        found = await asyncio.gather(*(self._answer(kind, ref, work) for ref in claims))
        return {ref.uid: answer for ref, answer in zip(claims, found, strict=True)}

    def start(self, kind: Kind, ref: ClaimRef, work: Work) -> "asyncio.Task[Devices]":
        """Starts `work` with the lock of the claim, after the tasks of the claim that were started before."""

        async def run() -> Devices:
            async with self.locked((claim_lock(ref.uid),)):
                self._progress[ref.uid] = _Progress(loop_time())
                try:
                    return await work(ref)
                finally:
                    del self._progress[ref.uid]

        def ended(task: asyncio.Task[Devices]) -> None:
            self._running.discard(task)
            if self._last.get(ref.uid, (kind, None))[1] is task:
                del self._last[ref.uid]
            self._changed()

        task = asyncio.create_task(run(), name=f"{kind} {ref.namespace}/{ref.name}")
        self._running.add(task)
        self._last[ref.uid] = kind, task
        task.add_done_callback(ended)
        task.add_done_callback(log_failure)
        return task

    def check_open(self) -> None:
        """Raises `ClaimError` after the end of the driver: nothing may be prepared that no owner would know."""
        if self.closed:
            raise ClaimError("the driver is stopping on this node, expected another instance to serve the claim")

    @contextlib.asynccontextmanager
    async def locked(self, names: Iterable[str]) -> AsyncGenerator[None]:
        """Holds the locks with these names, acquired in the order of the names."""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted(set(names)):
                lock, users = self._locks.get(name, (asyncio.Lock(), 0))
                self._locks[name] = lock, users + 1
                stack.callback(self._release, name)
                await stack.enter_async_context(lock)
            yield

    def is_locked(self, name: str) -> bool:
        """Whether a task has the lock or waits for it."""
        return name in self._locks

    def report(self, uid: str, device: str, activity: str) -> None:
        """Records what the task of the claim does. Others, such as the removal of orphans, have no record."""
        if (progress := self._progress.get(uid)) is not None:
            progress.device, progress.activity = device, activity

    @property
    def busy(self) -> bool:
        return bool(self._running)

    async def idle(self) -> None:
        """Waits for the end of all tasks."""
        while self._running:
            await asyncio.wait(self._running)

    async def _answer(self, kind: Kind, ref: ClaimRef, work: Work) -> Devices | ClaimError:
        """The result of the task for the claim, which a cancelled call does not cancel.

        A call joins the last task if that does the same. If another one follows it, as Unprepare follows a Prepare
        that takes long, its result is no longer true when the call gets it.
        """
        last = self._last.get(ref.uid)
        try:
            self.check_open()
        except ClaimError as error:
            return error
        task = last[1] if last is not None and last[0] == kind else self.start(kind, ref, work)
        await asyncio.wait((task,), timeout=self._time_limit)
        if not task.done():
            now = loop_time()
            progress = self._progress.get(ref.uid) or _Progress(now - self._time_limit)
            activity = f"{progress.activity}, {now - progress.since:.0f} s so far"
            return ClaimError(f"still {kind[:-1]}ing {progress.device} ({activity})")
        try:
            return task.result()
        except EXPECTED as error:
            return claim_error(error)
        except Exception as error:
            log.exception("claim %s/%s", ref.namespace, ref.name)
            return claim_error(error, f"internal error: {type(error).__name__}: ")

    def _release(self, name: str) -> None:
        lock, users = self._locks.pop(name)
        if users > 1:
            self._locks[name] = lock, users - 1


def claim_lock(uid: str) -> str:
    return f"claim {uid}"


def claim_error(error: Exception, prefix: str = "") -> ClaimError:
    """The error with the prefix, as `error_line`."""
    text = f"{prefix}{error.strerror or error if isinstance(error, OSError) else error}"
    if isinstance(error, OSError) and error.filename:
        text += f" ({error.filename})"
    return ClaimError(error_line(text))


def log_failure(task: "asyncio.Task[Any]") -> None:
    """Logs why a task failed: its call may not wait for it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s: %s", task.get_name(), error)
