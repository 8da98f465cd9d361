"""Names a plugin's hook that blocks the event loop: all sockets and all other plugins of the agent wait for it.

A thread looks at the hook that runs. It starts with a call and ends after a second without calls, so that nothing runs
while no hook is called.
"""

import contextlib
import logging
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any, TypeVar

from msgspec import Struct

from accelplane.host.blocking import ThreadLimitError, start_detached

log = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[str], None]

_LIMIT = 1.0
_MAX_FRAMES = 12


class _Call(Struct, eq=False):
    """A part of a hook that runs without returning to the loop. `reported` is set by the thread."""

    plugin: str
    hook: str
    thread: int
    began: float
    reported: str = ""


class _Watchdog:
    """Looks at the present call in intervals of `_LIMIT` seconds while there are calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Call | None = None
        self._calls = 0
        self._running = False

    def enter(self, call: _Call) -> _Call | None:
        """Returns the call that continues after this one."""
        outer, self._current = self._current, call
        with self._lock:
            self._calls += 1
            start, self._running = not self._running, True
        if start:
            try:
                start_detached(self._run)
            except ThreadLimitError:
                self._running = False  # the next call tries again
        return outer

    def leave(self, outer: _Call | None) -> None:
        self._current = outer

    def _run(self) -> None:
        seen = -1
        while True:
            time.sleep(_LIMIT)
            call = self._current
            if call is not None and not call.reported and time.monotonic() - call.began >= _LIMIT:
                self._report(call)
            with self._lock:
                if self._calls == seen and self._current is None:
                    self._running = False
                    return
                seen = self._calls

    def _report(self, call: _Call) -> None:
        stack = _stack(sys._current_frames().get(call.thread))  # pyright: ignore[reportPrivateUsage] - as faulthandler
        if self._current is not call:
            return  # the stack is of another call
        call.reported = stack[-1].splitlines()[0].strip() if stack else "unknown"
        log.error(
            "plugin %s: %s has blocked the event loop for %.1f s, expected an await or a thread; "
            "the kubelet's calls to all plugins wait for it\n%s",
            call.plugin, call.hook, time.monotonic() - call.began, "".join(stack).rstrip(),
        )  # fmt: skip


_WATCHDOG = _Watchdog()


@contextlib.contextmanager
def watching(plugin: str, hook: str, report: Report | None = None) -> Generator[None]:
    """Names the hook in the log if the block takes longer than a second, and then calls `report` with the problem."""
    call = _Call(plugin, hook, threading.get_ident(), time.monotonic())
    outer = _WATCHDOG.enter(call)
    try:
        yield
    finally:
        _WATCHDOG.leave(outer)
        if call.reported and report is not None:
            report(f"{hook} blocked it for {time.monotonic() - call.began:.1f} s at {call.reported}")


async def watched(plugin: str, hook: str, start: Callable[[], Awaitable[T]], report: Report | None = None) -> T:
    """The result of the coroutine that a plugin's hook returns, each step of which is watched.

    Raises `TypeError` if it is no coroutine. A `SystemExit`, which would end the agent, becomes a `RuntimeError`.
    """
    return await _steps(plugin, hook, start, report)


@types.coroutine
def _steps(plugin: str, hook: str, start: Callable[[], Awaitable[T]], report: Report | None) -> Generator[Any, Any, T]:
    steps: Generator[Any, Any, T] | None = None
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            with watching(plugin, hook, report):
                if steps is None:
                    steps = _awaited(hook, start())
                yielded = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value
        except SystemExit as exit_:
            raise RuntimeError(f"{hook} raised SystemExit: {exit_}") from exit_
        try:
            value, error = (yield yielded), None
        except BaseException as caught:  # noqa: BLE001 - raised in the coroutine
            value, error = None, caught


def _awaited(hook: str, found: Awaitable[T]) -> Generator[Any, Any, T]:
    if not isinstance(found, Awaitable):  # pyright: ignore[reportUnnecessaryIsInstance] - hooks are not type-checked
        raise TypeError(f"{hook}: found {ascii(found)[:82]}, expected a coroutine; define the hook with async def")
    return found.__await__()


def _stack(frame: FrameType | None) -> list[str]:
    """The innermost frames, outermost first, without those of this module and of the event loop around them."""
    frames: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename != __file__:
        frames.append(frame)
        frame = frame.f_back
    return [line for each in reversed(frames[:_MAX_FRAMES]) for line in traceback.format_stack(each, limit=1)]
