"""Applies the parameters, follows the kernel module, and restores the parameters at the end.

The module has its defaults again after it was loaded again. The kernel reports that by a uevent; changes of parameters
cause none, and sysfs has no inotify events for either. A slow timer finds what no uevent reports.
"""

import asyncio
import contextlib
import logging
from collections.abc import Generator

from accelplane.host import Host, HostError
from accelplane.host.uevent import UeventSocket
from accelplane.onloadworker import parameters
from accelplane.onloadworker.configuration import WorkerError
from accelplane.onloadworker.crictl import HOST_ROOT
from accelplane.onloadworker.parameters import Values

log = logging.getLogger(__name__)

DEVICE = "/dev/onload"
INTERVAL = 60.0  # a check reads two small files
_INTERVAL_WITHOUT_UEVENTS = 10.0
_FIRST_RETRY, _LAST_RETRY = 0.2, 30.0
_DEVPATH = "/module/onload"


def require_device(root: str) -> None:
    """Raises `WorkerError` if this container has no device node of Onload, which the control plane server opens."""
    if Host(root).status(DEVICE) is None:
        raise WorkerError(
            f"{DEVICE} is not available: no such file in this container; load the kernel module onload. The node "
            "appears when the container restarts"
        )


class Worker:
    """`values` are the desired parameters of the module. `root` is the directory with `sys` and `dev`."""

    def __init__(self, values: Values, root: str = "/", *, interval: float = INTERVAL) -> None:
        self._values = values
        self._root = root
        self._interval = interval
        self._instance: tuple[int, int] | None = None
        self._previous = parameters.DEFAULTS
        self._problem = ""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Raises `WorkerError` if the parameters cannot be written at the start."""
        with self._uevents():
            try:
                self._apply()
            except HostError as error:
                raise WorkerError(str(error)) from None
            try:
                await self._follow()
            finally:
                self._restore()

    async def _follow(self) -> None:
        """Raises `WorkerError` if the container has to restart."""
        delay, retry = self._interval, _FIRST_RETRY
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._changed.wait()
                    retry = _FIRST_RETRY
            self._changed.clear()
            if self._check():
                delay, retry = self._interval, _FIRST_RETRY
            else:
                delay, retry = retry, min(2 * retry, _LAST_RETRY)

    def _check(self) -> bool:
        """Whether the module has the values, as far as that is for this process to decide. Raises `WorkerError`."""
        instance = parameters.module_instance(self._root)
        if instance is None:
            self._report(f"{parameters.MODULE}: not ready, waiting for the kernel module onload")
            self._instance = None
            return False
        try:
            if instance != self._instance:
                self._require_current_device()
                self._apply()
            elif parameters.read(self._root) != self._values:
                self._report(
                    f"{parameters.MODULE}/parameters: changed by another program, expected {self._values.path} "
                    f"{self._values.arguments}; restart this pod to set them again"
                )
                return True
        except HostError as error:
            self._report(str(error))
            return False
        self._problem = ""
        return True

    def _apply(self) -> None:
        """Raises `HostError` or `WorkerError`."""
        instance = parameters.module_instance(self._root)
        self._previous = parameters.final_values(parameters.read(self._root))
        parameters.write(self._root, self._values)
        self._instance = instance
        log.info("kernel module onload: the control plane server is %s %s", self._values.path, self._values.arguments)

    def _require_current_device(self) -> None:
        """Raises `WorkerError` if the node of the reloaded module has another number than that in this container."""
        require_device(self._root)
        own = Host(self._root).status(DEVICE)
        current = Host(self._root).status(f"{HOST_ROOT}{DEVICE}")
        if own is not None and current is not None and own.st_rdev != current.st_rdev:
            raise WorkerError(f"{DEVICE}: the host has another device number; restarting the container to get it")

    def _restore(self) -> None:
        try:
            if parameters.read(self._root) == self._values:
                parameters.write(self._root, self._previous)
                log.info("kernel module onload: the control plane server is restored")
        except (HostError, WorkerError) as error:
            log.warning("parameters not restored: %s", error)

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("%s", problem)

    @contextlib.contextmanager
    def _uevents(self) -> Generator[None]:
        """Sets `_changed` when the module is loaded or unloaded."""
        try:
            socket = UeventSocket()
        except OSError as error:
            log.warning("uevents are not available, a reloaded module is found by the timer only: %s", error)
            self._interval = min(self._interval, _INTERVAL_WITHOUT_UEVENTS)
            yield
            return

        def receive() -> None:
            for event in socket.read():
                if event.action == "overflow" or (event.subsystem == "module" and event.devpath == _DEVPATH):
                    self._changed.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(socket.fileno(), receive)
        try:
            yield
        finally:
            loop.remove_reader(socket.fileno())
            socket.close()
