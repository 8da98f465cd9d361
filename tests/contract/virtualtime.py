"""A deterministic event loop: virtual time, and threads that run only when a test starts them.

Time advances only when no callback is ready and no socket readable. Sockets, inotify and files are real: within one
process a write makes the other side readable at once, so nothing depends on the machine's speed.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from accelplane.host import blocking

T = TypeVar("T")


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


class Thread:
    """A blocking function that was started in a thread. `execute` runs it, `deliver` reports its end to the loop."""

    def __init__(self, work: Callable[[], Any], outcome: "asyncio.Future[Any]") -> None:
        self.work = work
        self.function: Callable[..., Any] = work.func if isinstance(work, functools.partial) else work
        self.executed = False
        self._outcome = outcome
        self._result: Any = None
        self._error: BaseException | None = None

    def execute(self) -> None:
        if self.executed:
            return
        self.executed = True
        try:
            self._result = self.work()
        except Exception as error:  # noqa: BLE001 - delivered to the caller
            self._error = error

    def deliver(self) -> None:
        self.execute()
        if self._outcome.done():
            return
        if self._error is not None:
            self._outcome.set_exception(self._error)
        else:
            self._outcome.set_result(self._result)


class Threads:
    """Replaces `start_thread` of `accelplane.host.blocking`. With `immediate`, threads complete immediately."""

    def __init__(self) -> None:
        self.running: list[Thread] = []
        self.immediate = True

    def start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        thread = Thread(work, outcome)
        if self.immediate:
            asyncio.get_running_loop().call_soon(thread.deliver)
        else:
            self.running.append(thread)
        return outcome

    def deliver(self, index: int = 0) -> None:
        self.running.pop(index).deliver()

    def deliver_all(self) -> None:
        while self.running:
            self.deliver()


@contextmanager
def controlled(loop: VirtualTimeLoop, threads: Threads, *modules: ModuleType) -> Iterator[None]:
    """Replaces the clock of `modules` with that of the loop, and the threads of all modules."""
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time, perf_counter=loop.time)
    patches = [patch.object(module, "time", clock) for module in modules if hasattr(module, "time")]
    patches.append(patch.object(blocking, "start_thread", threads.start))
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
