"""Runs functions that read files of the node, and continues without devices whose files block (decision 0027)."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from accelplane.host.blocking import END_TIMEOUT, SerialThread, retrieve_exception, start_thread
from accelplane.host.files import HostFiles
from accelplane.host.operations import Blocked, device_of

log = logging.getLogger(__name__)

T = TypeVar("T")
HostT = TypeVar("HostT", bound=HostFiles)

# An operation blocks if it is in progress at two polls in a row.
POLL_INTERVAL = 0.3
# Links of sysfs do not block with their device. On a loaded machine a thread may start late.
_LINKS_TIMEOUT = 5.0
# Enabling virtual functions or a reset holds the lock of a device for seconds.
UNHEALTHY_AFTER = 10.0
_MAX_BLOCKED = 64  # each keeps a thread


class BlockedDevices:
    """The devices of which an operation has not returned, for all plugins of a process."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when a device is added, has been blocked for `UNHEALTHY_AFTER`, and is removed."""
        self.by_device: dict[str, Blocked] = {}
        self._changed = changed

    async def add(self, host: HostFiles, path: str, running: "asyncio.Future[T]") -> bool:
        """Adds the device of the path until `running` ends. Returns False if `running` has ended, or it cannot.

        Functions of several plugins may wait for one device: all are left, and the first one that ends removes it.
        """
        device = await _device_of(host, path)
        if device in self.by_device and not running.done():
            return True
        if running.done() or len(self.by_device) >= _MAX_BLOCKED:
            return False
        log.warning("%s: %s does not answer; devices are read without it", device, path)
        self.by_device[device] = Blocked(path, time.monotonic())
        timer = asyncio.get_running_loop().call_later(UNHEALTHY_AFTER, self._changed)

        def remove(_running: "asyncio.Future[T]") -> None:
            log.info("%s: %s answers again", device, path)
            timer.cancel()
            del self.by_device[device]
            self._changed()

        running.add_done_callback(remove)
        self._changed()
        return True

    def problem(self, device: str) -> str:
        """Why the device is unhealthy, empty if it is not or not yet."""
        blocked = self.by_device.get(device)
        if blocked is None or time.monotonic() - blocked.since < UNHEALTHY_AFTER:
            return ""
        return f"{blocked.path} does not answer"


class HostThread:
    """Runs functions in threads, one at a time. The owner calls `wait_idle` at its end.

    A function whose file operation blocks is left to its thread, which ends it when the operation returns. The function
    is then run again, with a new host that omits the device.
    """

    def __init__(self, devices: BlockedDevices | None = None) -> None:
        self.devices = devices or BlockedDevices()
        self._thread = SerialThread()
        self._watches: set[asyncio.Task[bool]] = set()
        self._current: tuple[HostFiles, asyncio.Future[Any]] | None = None  # the function that runs

    async def run(self, host: HostT, work: Callable[[HostT], T]) -> tuple[T, HostT]:
        """The result of `work`, and the host with which it was made. Raises its exception, or `ThreadLimitError`.

        When cancelled, the function continues, and the next `run` waits for its end.
        """
        while True:
            host.blocked = self.devices.by_device
            if self._thread.busy and self._current is not None:
                await self._watch(*self._current)  # its caller may have ended
            await self._thread.wait()
            running = self._thread.start(partial(work, host))
            running.add_done_callback(retrieve_exception)
            self._current = host, running
            running.add_done_callback(self._forget)
            if not await self._watch(host, running):
                return running.result(), host
            host = host.fresh()

    async def wait_idle(self, owner: str, seconds: float = END_TIMEOUT) -> bool:
        """As `SerialThread.wait_idle`. Threads of blocked devices end with the process."""
        idle = await self._thread.wait_idle(owner, seconds)
        for watch in self._watches:
            watch.cancel()
        return idle

    def _forget(self, running: "asyncio.Future[Any]") -> None:
        """Forgets a function that has ended: its host keeps directories open."""
        if self._current is not None and self._current[1] is running:
            self._current = None

    async def _watch(self, host: HostFiles, running: "asyncio.Future[Any]") -> bool:
        """As `_is_blocked`, in a task that continues when the caller is cancelled, until `wait_idle`."""
        watch = asyncio.create_task(self._is_blocked(host, running))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return await asyncio.shield(watch)

    async def _is_blocked(self, host: HostFiles, running: "asyncio.Future[T]") -> bool:
        """Waits until the function ends, or until a device was added because of it and its thread was left."""
        earlier = 0
        while True:
            done, _pending = await asyncio.wait((running,), timeout=POLL_INTERVAL)
            if done:
                return False
            path, count = host.operation.path, host.operation.count
            if path and count == earlier and await self.devices.add(host.fresh(), path, running):
                host.operation.abandoned = True
                if self._current is not None and self._current[1] is running:  # else another watch has left it
                    self._thread.detach()
                return True
            earlier = count if path else 0


async def _device_of(host: HostFiles, path: str) -> str:
    """The device of a path. It reads links, which may block in turn: then that of the path with its links."""
    try:
        async with asyncio.timeout(_LINKS_TIMEOUT):
            return await start_thread(lambda: device_of(host.resolve(path)))
    except Exception:  # noqa: BLE001 - links that loop, or the limit of threads
        return device_of(path)
