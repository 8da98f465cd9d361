"""Health by commands of the configuration: one owner runs them, each with a time limit, and few at once.

A command gets no standard input, a small environment, and a process group, which is killed at the time limit. Its
output, of which the first bytes are read, is the reason if it fails.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from accelplane.devices import Device, Verdict
from accelplane.plugins.generic.config import MAX_CHECKED, HealthCommand, expand
from accelplane.processes import end_process

_CONCURRENT = 4
_POLL_INTERVAL = 0.02
_OUTPUT_LIMIT = 4096
_SHOWN = 200
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
# Serial numbers come from the device. A shell must not find anything but words in them.
_SAFE = re.compile(r"[A-Za-z0-9_./:+=@%,-]*")


_NOT_FINISHED = Verdict("bad", "the health command has not finished yet", "no-answer")


class Check(NamedTuple):
    """The command of a unit, and the values of its placeholders."""

    health: HealthCommand
    values: Mapping[str, str]


class _Streak(NamedTuple):
    """Results of a unit: whether it is healthy, None before the first verdict, and the results that differ in a row."""

    healthy: bool | None = None
    differing: int = 0


class CommandSource:
    """Runs the commands of units, and has their verdicts. `verdicts` may be called in any thread."""

    def __init__(self) -> None:
        self._checks: Mapping[str, Check] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._streaks: dict[str, _Streak] = {}
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(_CONCURRENT)

    def set_checks(self, checks: Mapping[str, Check]) -> None:
        """Replaces the commands by unit. May be called in any thread."""
        if checks != self._checks:
            self._checks = dict(checks)
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(self._changed.set)

    def verdicts(self, devices: Sequence[Device]) -> dict[str, Verdict]:
        """The verdicts of the devices' units. Units are unhealthy until their command has ended once."""
        units = {device.unit for device in devices} & self._checks.keys()
        return {unit: self._verdicts.get(unit, _NOT_FINISHED) for unit in units}

    async def first_verdicts(self, devices: Sequence[Device], seconds: float) -> dict[str, Verdict]:
        """As `verdicts`, after it has waited for the commands of new units for a time. It may run in any event loop."""
        end = time.monotonic() + seconds
        while _NOT_FINISHED in (found := self.verdicts(devices)).values() and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL)
        return found

    async def run(self, changed: Callable[[], None]) -> None:
        """Runs the commands until cancelled, then kills them. `changed` is called after each new verdict."""
        self._loop = asyncio.get_running_loop()
        running: dict[str, tuple[Check, asyncio.Task[None]]] = {}
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._changed.clear()
                checks = dict(sorted(self._checks.items())[:MAX_CHECKED])
                for unit in [unit for unit, (check, _task) in running.items() if checks.get(unit) != check]:
                    running.pop(unit)[1].cancel()
                for unit in self._verdicts.keys() - checks.keys():
                    del self._verdicts[unit]
                    self._streaks.pop(unit, None)
                for unit in checks.keys() - running.keys():
                    task = asyncio.create_task(self._repeat(unit, checks[unit], changed))
                    running[unit] = checks[unit], task
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                for unit in self._checks.keys() - checks.keys():
                    self._verdicts[unit] = Verdict("bad", f"there are more than {MAX_CHECKED} health commands")
                if len(self._checks) > len(checks):
                    changed()
                await self._changed.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, unit: str, check: Check, changed: Callable[[], None]) -> None:
        while True:
            async with self._slots:
                problem = await _run(check)
            if (verdict := self.judge(unit, check.health, problem)) is not None:
                self._verdicts[unit] = verdict
                changed()
            await asyncio.sleep(check.health.period_seconds)

    def judge(self, unit: str, health: HealthCommand, problem: str) -> Verdict | None:
        """The verdict after one more result, None if it changes nothing. The first result decides at once."""
        healthy = not problem
        before = self._streaks.get(unit, _Streak())
        differing = 0 if healthy == before.healthy else before.differing + 1
        needed = health.success_threshold if healthy else health.failure_threshold
        if healthy == before.healthy or (before.healthy is not None and differing < needed):
            self._streaks[unit] = _Streak(before.healthy, differing)
            return None
        self._streaks[unit] = _Streak(healthy)
        return Verdict("good") if healthy else Verdict("bad", problem)


async def _run(check: Check) -> str:
    """Runs the command of a unit once; returns why it failed, empty after success."""
    health, values = check
    unsafe = [name for name, value in values.items() if not _SAFE.fullmatch(value)]
    for name in unsafe:
        if any(f"{{{name}}}" in argument for argument in health.command):
            return f"health command: {name} is {values[name][:_SHOWN]!a}, expected letters, digits and _./:+=@%,-"
    command = [expand(argument, values) for argument in health.command]
    environment = {**_ENVIRONMENT, **{f"DEVICE_{name.upper()}": values[name] for name in ("path", "name", "serial")}}
    try:
        with _Output() as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output.writer, stderr=output.writer,
                start_new_session=True, env=environment, cwd="/",
            )  # fmt: skip
            status = await _wait(process, health.timeout_seconds)
            shown = output.first_line()
    except (OSError, RuntimeError) as error:  # limits of files, processes and threads
        return f"health command {command[0]}: {getattr(error, 'strerror', None) or error}"
    if not status:
        return f"health command {command[0]} did not end within {health.timeout_seconds} s" if status is None else ""
    end = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
    return f"health command {command[0]} {end}" + (f": {shown}" if shown else "")


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The status of the process, None if it did not end in time. Then kills its process group."""
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        # Also if it has ended: processes that it left would pile up.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await end_process(process)


class _Output:
    """A pipe for the output of a command, of which the beginning is kept.

    A pipe of asyncio would stay open as long as any process has it, such as one that the command has left.
    """

    def __init__(self) -> None:
        self._data = b""
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)

    def first_line(self) -> str:
        """The first line that is not empty, with escape sequences and shortened."""
        self._read()
        lines = (line.strip() for line in self._data.decode(errors="replace").splitlines())
        return ascii(next(filter(None, lines), "")[:_SHOWN])[1:-1]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._data += os.read(self._reader, 65536)[: _OUTPUT_LIMIT - len(self._data)]
