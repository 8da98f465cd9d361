"""Serves reports on a Unix socket. Processes are read at the request of a client only.

A process whose file blocks the reader is left out, together with the thread that reads it: until the read returns, and
for a minute at least.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection
from typing import NamedTuple

from accelplane.gpuclients.messages import TIMEOUT, MessageError, Report, Request, encode_report, receive
from accelplane.gpuclients.usage import Usage
from accelplane.gpuclients.walk import ContainerNames, Limits, Pass
from accelplane.host.blocking import retrieve_exception, start_thread
from accelplane.logs import v

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 107  # sun_path has 108 bytes with the final zero (unix(7))
_MAX_CONNECTIONS = 8
_MAX_BLOCKED = 4
_MIN_INTERVAL = 1.0
_WALK_TIMEOUT = 1.2
_BLOCKED_PAUSE = 60.0
# A pod that no client has requested for this time is forgotten, with its sums.
_POD_LIFETIME = 3600.0
_MAX_PODS = 4096


class _Blocked(NamedTuple):
    """A read that did not return in time, and the time until which its process is left out."""

    reading: "asyncio.Future[None]"
    until: float


class ClientsService:
    """Makes reports. Requests within `min_interval` share one walk over `proc`. The owner calls `close` at its end."""

    def __init__(
        self,
        proc: str,
        *,
        limits: Limits | None = None,
        min_interval: float = _MIN_INTERVAL,
        walk_timeout: float = _WALK_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._limits = limits or Limits()
        self._min_interval = min_interval
        self._walk_timeout = walk_timeout
        self._clock = clock
        self._usage = Usage()
        self._names = ContainerNames()
        self._requested: dict[str, float] = {}
        self._walked: frozenset[str] = frozenset()
        self._walked_at = float("-inf")
        self._after = 0
        self._incomplete = False
        self._processes = 0
        self._blocked: dict[int, _Blocked] = {}
        self._lock = asyncio.Lock()
        self._denied = False

    async def report(self, pods: Collection[str]) -> Report:
        """The use of GPUs by the pods with these UIDs. Raises `OSError` if processes cannot be listed."""
        async with self._lock:
            now = self._clock()
            self._request(pods, now)
            if now - self._walked_at >= self._min_interval or not self._walked.issuperset(pods):
                await self._walk(frozenset(self._requested), now)
            return self._usage.report(pods, incomplete=self._incomplete, processes=self._processes)

    @property
    def blocked(self) -> Collection[int]:
        """The processes whose files block a reader now."""
        return [pid for pid, blocked in self._blocked.items() if not blocked.reading.done()]

    async def close(self) -> None:
        """Waits for a report that is being made. Threads that block in the kernel end with the process."""
        async with self._lock:
            self._blocked.clear()

    def _request(self, pods: Collection[str], now: float) -> None:
        self._requested.update(dict.fromkeys(pods, now))
        expired = {pod for pod, last in self._requested.items() if now - last > _POD_LIFETIME}
        expired |= set(sorted(self._requested, key=lambda pod: -self._requested[pod])[_MAX_PODS:])
        if expired:
            self._usage.forget(expired)
            self._requested = {pod: last for pod, last in self._requested.items() if pod not in expired}

    async def _walk(self, pods: frozenset[str], now: float) -> None:
        self._blocked = {
            pid: each for pid, each in self._blocked.items() if now < each.until or not each.reading.done()
        }
        if len(self.blocked) >= _MAX_BLOCKED:
            self._incomplete = True
            return
        current = Pass(self._proc, self._limits, self._names)
        first, after, skip = self._usage.pids, self._after, frozenset(self._blocked)
        running = start_thread(lambda: current.run(pods, first, after, skip))
        running.add_done_callback(retrieve_exception)
        try:
            await asyncio.wait((running,), timeout=self._walk_timeout)
        except asyncio.CancelledError:
            # The thread may block: it counts until it ends, and the next walk leaves its process out until then.
            current.abandoned = True
            self._blocked[current.reading] = _Blocked(running, now)
            raise
        if running.done():
            running.result()
        else:
            current.abandoned = True
            pid = current.reading
            self._blocked[pid] = _Blocked(running, now + _BLOCKED_PAUSE)
            log.warning(
                "%s: a read takes longer than %g s; it is left out for %g s",
                f"files of process {pid}" if pid else self._proc, self._walk_timeout, _BLOCKED_PAUSE,
            )  # fmt: skip
        walk = current.result()
        self._usage.update(walk)
        self._walked, self._walked_at = pods, now
        self._after = 0 if walk.complete else current.last
        self._incomplete, self._processes = not walk.complete, current.processes
        if current.denied and not self._denied:
            problem = "%d processes of pods cannot be read: permission denied; add the capability SYS_PTRACE"
            log.warning(problem, current.denied)
        self._denied = current.denied > 0


@contextlib.asynccontextmanager
async def serving(path: str, service: ClientsService) -> AsyncGenerator[None]:
    """Serves reports at `path` while entered. Raises `OSError` or `ValueError` if it cannot listen."""
    tasks: set[asyncio.Task[None]] = set()
    ending = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ending or len(tasks) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(_serve(service, reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # Not in the task: one that is cancelled before its first step executes nothing.
        task.add_done_callback(lambda _task: writer.close())

    listening = _listening_socket(path)
    inode = os.lstat(path).st_ino
    server = await asyncio.start_unix_server(accept, sock=listening)
    log.log(v(1), "listening on %s", path)
    try:
        yield
    finally:
        ending = True
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_ino == inode:
                os.unlink(path)
        # A closed server of asyncio leaves connections open that it has accepted in the same step of the event loop.
        asyncio.get_running_loop().remove_reader(listening)
        await asyncio.sleep(0)
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.close()


async def _serve(service: ClientsService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request. The caller closes the connection."""
    try:
        async with asyncio.timeout(TIMEOUT):
            request = await receive(reader, Request)
            writer.write(encode_report(await service.report(frozenset(request.pods))))
            await writer.drain()
    except (MessageError, TimeoutError) as error:
        log.log(v(2), "request rejected: %s", error or f"not complete within {TIMEOUT:g} s")
    except OSError as error:
        log.error("no report: %s: %s", error.filename or "socket", error.strerror or error)


def _listening_socket(path: str) -> socket.socket:
    """A socket that only the owner may use, at `path` in place of one of an earlier process."""
    new = f"{path}.new"
    if len(os.fsencode(new)) > MAX_PATH_BYTES:
        raise ValueError(
            f"{path}: a socket path of {len(os.fsencode(path))} bytes, expected at most {MAX_PATH_BYTES - 4}"
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        # Before bind, so that the file never has another mode.
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(new)
        listening.listen(_MAX_CONNECTIONS)
        os.rename(new, path)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, error.strerror, path) from error
    return listening
