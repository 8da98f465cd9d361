"""Runs the worker process of the Level-Zero service (`zeworker`) with limits of time, and restarts it.

One task, `ZeProcess.run`, owns the process and sends it one request at a time. A request that takes too long or crashes
the process is answered with an error, the process is killed and started again, at first soon and then less often. The
device that caused it is skipped for some time, so that the others stay readable.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Mapping, Sequence

import msgspec

from accelplane.gpuservices.zeapi import DEPENDENCY_UNAVAILABLE, DEVICE_LOST, REQUIRES_RESET, UNKNOWN, error_text

log = logging.getLogger(__name__)

# Where WSL has the libraries of the graphics driver.
WSL_LIBRARIES = "/usr/lib/wsl/lib"
_COMMAND = (sys.executable, "-I", "-m", "accelplane.gpuservices.zeworker")
# After these results another enumeration may find more: a device that was added, or one after a reset.
_STALE = frozenset((DEVICE_LOST, REQUIRES_RESET, UNKNOWN))
_LOG_LEVELS = {1: logging.ERROR, 2: logging.WARNING}
_LOG_AGAIN = 3600.0
_MAX_REMEMBERED = 1000
_MAX_LINE = 16 * 1024
_MAX_QUEUE = 1000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    request: float = 1.5  # from a request to its response; the GPU plugin waits for 2
    call: float = 1.2  # of that, the time in native code; then the process is killed
    init: float = 60.0
    first_retry: float = 0.1  # until the process is started again; doubles
    last_retry: float = 60.0
    first_device_retry: float = 30.0  # until a device that blocked or crashed the process is queried again; doubles
    last_device_retry: float = 600.0
    first_refresh: float = 60.0  # until devices are enumerated again, if one is unknown or lost; doubles
    last_refresh: float = 3600.0
    end: float = 1.0


class InitError(Exception):
    """Level-Zero cannot be initialized."""

    def __init__(self, text: str, code: int = DEPENDENCY_UNAVAILABLE) -> None:
        super().__init__(text)
        self.code = code


class RequestError(Exception):
    """A request has no response from native code; `code` is the ze_result_t to respond with."""

    def __init__(self, code: int) -> None:
        super().__init__(error_text(code))
        self.code = code


class _Broken(Exception):
    """The process has ended, does not respond, or responds with something else."""


class _Request(msgspec.Struct, eq=False):
    line: str
    device: str
    response: asyncio.Future[tuple[str, ...]]


class _Child(SubprocessStreamProtocol):
    """A running process. `exited` is done when it has ended, also if a process that it started keeps its pipes."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(limit=_MAX_LINE, loop=loop)
        self.exited: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "_Child":
        """Raises `OSError`."""
        loop = asyncio.get_running_loop()
        transport, child = await loop.subprocess_exec(cls, *command, stderr=None, env=environment)
        child.transport = transport
        return child

    def process_exited(self) -> None:
        super().process_exited()
        if not self.exited.done():
            self.exited.set_result(None)

    @property
    def end_text(self) -> str:
        status = self.transport.get_returncode()
        return f"the worker process ended with {f'signal {-status}' if status and status < 0 else f'status {status}'}"

    async def send(self, line: str) -> None:
        """Raises `_Broken`."""
        try:
            if self.stdin is not None:
                self.stdin.write(line.encode("ascii") + b"\n")
                await self.stdin.drain()
        except OSError:
            await asyncio.wait((self.exited,))
            raise _Broken(self.end_text) from None

    async def receive(self) -> str:
        """The next line. Raises `_Broken`, or `ValueError` if it is too long or not ASCII."""
        if self.stdout is None:
            raise ValueError("no standard output")
        try:
            return (await self.stdout.readuntil()).decode("ascii").rstrip()
        except asyncio.IncompleteReadError:
            # `await self.exited` would cancel the future at a timeout, and the process would count as ended.
            await asyncio.wait((self.exited,))
            raise _Broken(self.end_text) from None
        except asyncio.LimitOverrunError as error:
            raise ValueError(str(error)) from None


class ZeProcess:
    """The worker process. `mode` is `sysman` or `core`, which it initializes. `command` is its program."""

    def __init__(
        self, mode: str, verbosity: int, limits: Limits | None = None, command: Sequence[str] = _COMMAND
    ) -> None:
        self._command = (*command, mode, str(verbosity))
        self._environment = _environment(os.environ, mode)
        self._limits = limits or Limits()
        self._requests: asyncio.Queue[_Request] = asyncio.Queue(_MAX_QUEUE)
        self._waits: dict[str, _Backoff] = {}  # by device
        self._down: int | None = None  # the code of responses while the process cannot be used
        self._logged: dict[str, float] = {}
        self._refresh = _Backoff(self._limits.first_refresh, self._limits.last_refresh)
        self.initialized = asyncio.Event()

    async def ask(self, request: str, bdf: str = "") -> tuple[str, ...]:
        """The code and the values of the response. Raises `RequestError` within the limit of a request."""
        device = bdf or request
        if self._down is not None:
            raise RequestError(self._down)
        if (wait := self._waits.get(device)) is not None and wait.active:
            raise RequestError(DEPENDENCY_UNAVAILABLE)
        response: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        try:
            self._requests.put_nowait(_Request(f"{request} {bdf}", device, response))
            async with asyncio.timeout(self._limits.request):
                return await response
        except (TimeoutError, asyncio.QueueFull):
            raise RequestError(DEPENDENCY_UNAVAILABLE) from None

    async def run(self) -> None:
        """Runs the process until cancelled. Raises `InitError` if the first initialization fails."""
        backoff = _Backoff(self._limits.first_retry, self._limits.last_retry)
        self._refresh.record_failure()
        while True:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    child = await _Child.start(self._command, self._environment)
                    stack.push_async_callback(self._end, child)
                    await self._initialize(child)
                    self._down = None
                    self.initialized.set()
                    await self._serve(child)
                continue
            except InitError as error:
                if not self.initialized.is_set():
                    raise
                problem, code = str(error), error.code
            except (_Broken, OSError) as error:
                problem, code = str(error), DEPENDENCY_UNAVAILABLE
            delay = backoff.record_failure()
            log.error("%s; restarting the worker process in %g s", problem, delay)
            if delay >= self._limits.request:  # else requests can wait
                self._refuse(code)
            await asyncio.sleep(delay)

    async def _end(self, child: _Child) -> None:
        """Kills the process. In an uninterruptible system call it remains; requests fail until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            child.transport.kill()
        try:
            await asyncio.wait((child.exited,), timeout=self._limits.end)
            task = asyncio.current_task()
            if not child.exited.done() and task is not None and not task.cancelling():
                self._refuse(DEPENDENCY_UNAVAILABLE)
                log.error("worker process %d has not ended: it is blocked in a system call", child.transport.get_pid())
                await asyncio.wait((child.exited,))
        finally:
            child.transport.close()

    async def _initialize(self, child: _Child) -> None:
        try:
            async with asyncio.timeout(self._limits.init):
                code = int((await self._exchange(child, "init"))[0])
        except TimeoutError:
            raise InitError(f"Level-Zero does not initialize within {self._limits.init:g} s") from None
        except _Broken as error:
            raise InitError(f"Level-Zero cannot be initialized: {error}") from None
        if code:
            raise InitError(f"Level-Zero cannot be initialized: {error_text(code)}", code)

    async def _serve(self, child: _Child) -> None:
        """Sends requests until devices should be enumerated again. Raises `_Broken`."""
        while True:
            request = await self._next(child)
            if request.response.done():  # the caller was cancelled
                continue
            code = int((await self._respond(child, request))[0])
            if code in _STALE and not self._refresh.active:
                self._refresh.record_failure()
                log.info("%s: %s; enumerating the devices again", request.line, error_text(code))
                return

    async def _next(self, child: _Child) -> _Request:
        get = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait((get, child.exited), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            raise _Broken(child.end_text)
        finally:
            get.cancel()

    async def _respond(self, child: _Child, request: _Request) -> tuple[str, ...]:
        try:
            async with asyncio.timeout(self._limits.call):
                values = await self._exchange(child, request.line)
        except (TimeoutError, _Broken) as error:
            if not request.response.done():
                request.response.set_exception(RequestError(DEPENDENCY_UNAVAILABLE))
            self._do_not_ask(request.device)
            problem = str(error) or f"no response within {self._limits.call:g} s"
            raise _Broken(f"{request.line}: {problem}") from None
        self._waits.pop(request.device, None)
        if not request.response.done():
            request.response.set_result(values)
        return values

    async def _exchange(self, child: _Child, line: str) -> tuple[str, ...]:
        """Sends a line and logs messages until the response. Raises `_Broken`, or `InitError`."""
        try:
            await child.send(line)
            while True:
                kind, _, text = (await child.receive()).partition(" ")
                if kind == "=":
                    values = tuple(text.split())
                    int(values[0])
                    return values
                if kind == "!":
                    raise InitError(text)
                self._log(int(kind), text)
        except (ValueError, IndexError):
            raise _Broken("found an invalid response of the worker process") from None

    def _log(self, level: int, text: str) -> None:
        """Logs a message that is new, or was not logged for an hour: the same sensors are missing at every request."""
        now = time.monotonic()
        if now - self._logged.get(text, -_LOG_AGAIN) < _LOG_AGAIN:
            return
        if len(self._logged) >= _MAX_REMEMBERED:
            self._logged.clear()
        self._logged[text] = now
        log.log(_LOG_LEVELS.get(level, logging.INFO), "%s", text)

    def _do_not_ask(self, device: str) -> None:
        if len(self._waits) >= _MAX_REMEMBERED:
            self._waits.clear()
        backoff = _Backoff(self._limits.first_device_retry, self._limits.last_device_retry)
        delay = self._waits.setdefault(device, backoff).record_failure()
        log.error("%s: skipped for %g s", device, delay)

    def _refuse(self, code: int) -> None:
        """Responds to requests with an error, until the process is initialized again."""
        self._down = code
        while not self._requests.empty():
            request = self._requests.get_nowait()
            if not request.response.done():
                request.response.set_exception(RequestError(code))


class _Backoff:
    """A delay that doubles with each failure, and is the first one again after a time without failures."""

    def __init__(self, first: float, last: float) -> None:
        self._first = self._delay = first
        self._last = last
        self._until = 0.0

    @property
    def active(self) -> bool:
        return time.monotonic() < self._until

    def record_failure(self) -> float:
        """Returns the delay."""
        now = time.monotonic()
        delay = self._first if now - self._until > self._last else self._delay
        self._until = now + delay
        self._delay = min(2 * delay, self._last)
        return delay


def _environment(environment: Mapping[str, str], mode: str) -> dict[str, str]:
    if mode != "core":
        return dict(environment)
    paths: Sequence[str] = (environment.get("LD_LIBRARY_PATH", ""), WSL_LIBRARIES)
    return {**environment, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
