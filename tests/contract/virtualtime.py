"""A deterministic event loop: virtual time, and threads that run only when a test starts them.

Time advances only when no callback is ready and no socket readable. Sockets, inotify and files are real: within one
process a write makes the other side readable at once, so nothing depends on the machine's speed.
"""

import asyncio
import functools
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from accelplane.host import Host, blocking, files, isolation

T = TypeVar("T")

_read = files._read

# With TCP, a loaded kernel delivers some packets later.
TCP_DELAY = 0.001


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Where the loop would wait, its clock advances instead, after `max_delay` seconds without readable sockets."""

    loop: "VirtualTimeLoop"
    max_delay: float

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout != 0 and self.max_delay:
            events = super().select(self.max_delay)
        if not events and timeout is None:
            raise AssertionError("deadlock: no callback, no timer and no readable socket")
        if not events and timeout:
            self.loop.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` starts at 1000 s."""

    def __init__(self, max_delay: float = 0.0) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        selector.max_delay = max_delay
        super().__init__(selector)
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.errors.append(context))

    def time(self) -> float:
        return self.now

    def step(self, count: int = 1) -> None:
        """Runs `count` iterations. Time does not advance."""
        for _ in range(count):
            self.call_soon(self.stop)
            self.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.run_until_complete(coroutine)


class _KilledError(BaseException):
    """Ends a thread that blocks, as the end of its process does."""


class Thread:
    """A blocking function that was started in a thread. `execute` runs it, `deliver` reports its end to the loop."""

    def __init__(self, work: Callable[[], Any], outcome: "asyncio.Future[Any]", threads: "Threads") -> None:
        self.work = work
        self.function: Callable[..., Any] = work.func if isinstance(work, functools.partial) else work
        self.executed = False
        self.blocked = ""  # the path of the file whose read blocks
        self._threads = threads
        self._outcome = outcome
        self._result: Any = None
        self._error: BaseException | None = None
        self._killed = False
        self._paused, self._resumed = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def abandoned(self) -> bool:
        """Whether the function ends at its next file operation, because another one continues in its place."""
        arguments = self.work.args if isinstance(self.work, functools.partial) else ()
        return any(isinstance(each, Host) and each.operation.abandoned for each in arguments)

    def execute(self) -> None:
        """Runs the function until it ends or reads a file that blocks."""
        if self.executed:
            return
        self.executed = True
        if not self._threads.blocks:
            self._run()
            return
        threading.Thread(target=self._run_separately, daemon=True).start()
        self._paused.acquire()

    def deliver(self) -> None:
        """Does not report a function that blocks."""
        self.execute()
        if self.blocked or self._outcome.done():
            return
        if self._error is not None:
            self._outcome.set_exception(self._error)
        else:
            self._outcome.set_result(self._result)

    def pause(self, path: str) -> None:
        """Called by the function: waits for `resume`."""
        self.blocked = path
        self._paused.release()
        self._resumed.acquire()
        self.blocked = ""
        if self._killed:
            raise _KilledError

    def resume(self, *, kill: bool = False) -> None:
        """Continues a function that blocks, until it ends or blocks again."""
        self._killed = kill
        self._resumed.release()
        self._paused.acquire()

    def _run(self) -> None:
        try:
            self._result = self.work()
        except BaseException as error:  # noqa: BLE001 - delivered to the caller
            self._error = error

    def _run_separately(self) -> None:
        self._threads.local.thread = self
        self._run()
        self._paused.release()


class Threads:
    """Replaces `start_thread` of `accelplane.host.blocking`. With `immediate`, threads complete immediately.

    Reads of files below directories with the names in `blocks` do not return. A function that reads one waits in a
    real thread until `unblock`, and the test continues: at each time only one of all threads runs.
    """

    def __init__(self) -> None:
        self.running: list[Thread] = []
        self.waiting: list[Thread] = []  # delivered, but blocked
        self.immediate = True
        self.blocks: set[str] = set()
        self.local = threading.local()

    def start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        thread = Thread(work, outcome, self)
        if self.immediate:
            asyncio.get_running_loop().call_soon(self._deliver, thread)
        else:
            self.running.append(thread)
        return outcome

    def deliver(self, index: int = 0) -> None:
        self._deliver(self.running.pop(index))

    def deliver_all(self) -> None:
        while self.running:
            self.deliver()

    def unblock(self, name: str) -> None:
        """Reads below directories of this name return, in the order in which they began."""
        self.blocks.discard(name)
        for thread in [*self.waiting, *self.running]:
            if thread.blocked and not self._blocks(thread.blocked):
                thread.resume()
        waiting, self.waiting = self.waiting, []
        for thread in waiting:
            self._deliver(thread)

    def kill(self) -> None:
        """Ends the functions that block, as the end of the process does."""
        for thread in [*self.waiting, *self.running]:
            if thread.blocked:
                thread.resume(kill=True)
        self.waiting.clear()

    def read(self, path: str, descriptor: int, limit: int) -> bytes:
        """Replaces `files._read`."""
        while self._blocks(path):
            thread: Thread | None = getattr(self.local, "thread", None)
            assert thread is not None, f"the event loop reads {path}, which blocks"
            thread.pause(path)
        return _read(path, descriptor, limit)

    def _blocks(self, path: str) -> bool:
        return not self.blocks.isdisjoint(path.split("/"))

    def _deliver(self, thread: Thread) -> None:
        thread.deliver()
        if thread.blocked:
            self.waiting.append(thread)


@contextmanager
def controlled(loop: VirtualTimeLoop, threads: Threads, *modules: ModuleType) -> Iterator[None]:
    """Replaces the clock of `modules` with that of the loop, and the threads of all modules."""
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time, perf_counter=loop.time)
    patches = [patch.object(module, "time", clock) for module in modules if hasattr(module, "time")]
    patches += (patch.object(module, "start_thread", threads.start) for module in (blocking, isolation))
    patches.append(patch.object(files, "_read", threads.read))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def in_virtual_time(*modules: ModuleType) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Decorates a test whose deadlines must not depend on the load of the machine. `modules` get the loop's clock."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            loop = VirtualTimeLoop()
            try:
                with controlled(loop, Threads(), *modules):
                    loop.run(test(*arguments, **named))
            finally:
                loop.close()

        return run

    return decorate
