"""Blocking calls in separate threads.

One thread per call instead of a pool: an idle agent has no threads, except one that watches the health of QAT devices.
A call that blocks in the kernel (a device that does not answer) delays neither other calls nor the exit of the process,
because its thread is a daemon.
"""

import _thread
import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

END_TIMEOUT = 5.0


class ThreadLimitError(RuntimeError):
    """No thread can be started: the limit of the process, of its cgroup or of the machine is reached."""


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread; returns or raises its result."""
    return await start_thread(work)


def start_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs `work` in a new thread; the future gets its result. Raises `ThreadLimitError`."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        set_result = _call(work, outcome)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result)

    start_detached(run)
    return outcome


def start_detached(run: Callable[..., None], *arguments: object) -> None:
    """Runs a function in a new thread that nobody waits for. Raises `ThreadLimitError`."""
    try:
        # `threading.Thread.start` blocks the loop until the new thread has run.
        _thread.start_new_thread(run, arguments)
    except RuntimeError as error:
        raise ThreadLimitError(str(error)) from None


def _call(work: Callable[[], T], outcome: "asyncio.Future[T]") -> Callable[[], None]:
    """Runs `work`. Returns the function that gives the result to the future, for the thread of the loop."""
    result: T | None = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as caught:  # noqa: BLE001 - raised where the future is awaited
        error = caught

    def set_result() -> None:
        if outcome.done():
            return
        # A future cannot raise StopIteration. SystemExit would end the loop.
        if isinstance(error, (StopIteration, SystemExit)):
            outcome.set_exception(RuntimeError(f"raised {type(error).__name__}: {error}"))
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # pyright: ignore[reportArgumentType] - T where there is no error

    return set_result


class ThreadQueue:
    """Runs blocking functions one after the other in one thread, which ends with the last one.

    Threads that make many short system calls at the same time would wait for each other's interpreter lock after each
    call. A function that takes longer than `stall_timeout` seconds does not delay the others: another thread continues
    with them.
    """

    def __init__(self, stall_timeout: float = 0.02) -> None:
        self._stall_timeout = stall_timeout
        self._waiting: deque[Callable[[], None]] = deque()
        self._finished: deque[Callable[[], None]] = deque()
        self._threads: dict[object, float] = {}  # the monotonic times at which their present functions began
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._start_scheduled = False
        self._exhausted = False  # whether the last thread could not be started

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Adds `work` to the queue; the future gets its result."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            if not outcome.cancelled():
                self._finished.append(_call(work, outcome))

        with self._lock:
            self._waiting.append(run)
        if not self._start_scheduled:  # after the functions that callers submit now: their thread needs the same lock
            self._start_scheduled = True
            loop.call_soon(self._start_scheduled_thread, loop)
        return outcome

    def _start_scheduled_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        self._start_scheduled = False
        self._start_if_late(loop)

    def _start_if_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts a thread if functions wait and all threads are in functions that take longer than `stall_timeout`."""
        thread, now = object(), time.monotonic()
        with self._lock:
            late = bool(self._waiting) and all(since <= now - self._stall_timeout for since in self._threads.values())
            if late:
                self._threads[thread] = now
        if late and not self._start(thread, loop):
            with self._lock:
                del self._threads[thread]
        if (self._threads or self._waiting) and self._timer is None:
            self._timer = loop.call_later(self._stall_timeout, self._check, loop)

    def _start(self, thread: object, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether a thread was started; at the limit of threads the timer tries again."""
        try:
            start_detached(self._run, thread, loop)
        except ThreadLimitError as error:
            if not self._exhausted:
                log.warning("blocking calls wait: %s; retrying", error)
            self._exhausted = True
        else:
            self._exhausted = False
        return not self._exhausted

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._set_results()
        if self._waiting:
            self._start_if_late(loop)

    def _run(self, thread: object, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    del self._threads[thread]
                    break
                run = self._waiting.popleft()
                self._threads[thread] = time.monotonic()
            run()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._set_results)

    def _set_results(self) -> None:
        while self._finished:
            self._finished.popleft()()
        if self._timer is not None and not self._threads and not self._waiting:
            self._timer.cancel()
            self._timer = None


class SerialThread:
    """Runs blocking functions in threads, at most one at a time.

    A thread cannot be cancelled: when `run` is cancelled the function continues, and the next `run` waits for its end.
    The owner calls `wait_idle` at its end.
    """

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, or raises its exception. Raises `ThreadLimitError`."""
        await self.wait()
        return await asyncio.shield(self.start(work))

    async def wait(self) -> None:
        """Waits until no function runs."""
        while self._running is not None and not self._running.done():
            await asyncio.wait((self._running,))

    def start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Runs `work` without waiting for it. Call it only if no other function runs. Raises `ThreadLimitError`."""
        running = self._running = start_thread(work)
        return running

    def detach(self) -> None:
        """Leaves the function that runs to another owner."""
        self._running = None

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    async def wait_idle(self, owner: str, seconds: float = END_TIMEOUT) -> bool:
        """Waits until no function runs, at most `seconds`; returns whether none runs. Logs for `owner` if one does."""
        if self._running is not None:
            await asyncio.wait((self._running,), timeout=seconds)
        if self.busy:
            log.warning("%s: a call blocks for more than %g s; its thread ends with the process", owner, seconds)
        return not self.busy


def retrieve_exception(future: "asyncio.Future[T]") -> None:
    """A callback for futures whose caller may be cancelled before it awaits them: asyncio then logs no error."""
    if not future.cancelled():
        future.exception()
