"""Serves one resource to the kubelet: socket, registration and life cycle.

The life cycle is one loop: wait until the socket's path is free, serve, register, wait for a reason to start again.
The reasons are read from the directory, not from events: the own socket was removed or replaced, or `kubelet.sock` is
another one. When the kubelet's stream ends or never opens, the resource is registered again, with a new name of the
same socket. Errors here neither end the process nor affect other resources.

Two processes of one resource overlap during a rolling update. The one that has started later takes the socket's path
over. The earlier one sends no more lists, because the kubelet uses the last list that it gets. It answers calls for a
moment longer, so that the kubelet has the new list before the old stream ends; then it waits.

Kubelet behaviour (1.28 to 1.37): at its start a kubelet deletes every socket in the directory and then creates its own.
Until 1.36, when a stream of a resource ends after a new registration of the same resource, the kubelet drops the new
one, which then has to register again. Since 1.37 a path can be registered only once; see `pluginsocket`.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from accelplane import rpc
from accelplane.devices import Allocation, Device
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import messages, sockets
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.pluginsocket import PluginSocket
from accelplane.kubelet.registration import Registration
from accelplane.kubelet.registration_state import FIRST_RETRY, LAST_RETRY, MAX_CHECK_INTERVAL
from accelplane.logs import v

log = logging.getLogger(__name__)

_BUSY_RETRY, _BUSY_RETRY_AFTER_GRACE = 1.0, 3.0
_TERMINATION_GRACE = 30.0  # Kubernetes' default for a predecessor that is terminating
_HANDOVER = 2.0
_WITHDRAW_TIMEOUT = 0.5


class AllocationError(Exception):
    """The request cannot be served; the text reaches the pod's events. `outcome` is one of `ALLOCATION_OUTCOMES`."""

    def __init__(self, text: str, outcome: str = "plugin-error") -> None:
        super().__init__(text)
        self.outcome = outcome


ALLOCATION_OUTCOMES = ("ok", "unknown-id", "unhealthy", "plugin-error", "cdi-error")


class Allocator(Protocol):
    """Answers the kubelet's calls about a resource's devices. Any exception fails the pod with the error's text.

    `alone` is whether the call is for one container. The kubelet's are; the API allows several.
    """

    @property
    def prefers(self) -> bool: ...
    @property
    def pre_starts(self) -> bool: ...
    async def allocate(self, ids: Sequence[str], *, alone: bool = True) -> Allocation: ...
    async def preferred_allocation(
        self, available: Sequence[str], must_include: Sequence[str], size: int, *, alone: bool = True
    ) -> Sequence[str]: ...
    async def pre_start(self, ids: Sequence[str]) -> None: ...


class Stage(StrEnum):
    """State of a resource's server; while `waiting`, `ResourceServer.problem` is the reason."""

    WAITING = "waiting"
    SERVING = "serving"
    REGISTERED = "registered"
    STOPPED = "stopped"


class Counters:
    """Counts of one resource since its server was created; durations in seconds."""

    def __init__(self) -> None:
        self.registrations = 0
        self.registration_failures: dict[str, int] = {}
        self.lists_sent = 0
        self.last_list_time = 0.0
        self.allocations = 0
        self.allocation_failures = 0
        self.allocation_buckets = [0] * (len(LATENCY_BOUNDS) + 1)
        self.allocation_seconds_sum = 0.0
        self.allocation_outcomes: dict[str, int] = dict.fromkeys(ALLOCATION_OUTCOMES, 0)
        self.preferred_buckets = [0] * (len(LATENCY_BOUNDS) + 1)
        self.preferred_seconds_sum = 0.0

    def count_allocation(self, seconds: float, outcome: str) -> None:
        self.allocations += 1
        self.allocation_failures += outcome != "ok"
        self.allocation_outcomes[outcome] += 1
        self.allocation_seconds_sum += seconds
        self.allocation_buckets[bisect_left(LATENCY_BOUNDS, seconds)] += 1

    def count_preferred_allocation(self, seconds: float) -> None:
        self.preferred_seconds_sum += seconds
        self.preferred_buckets[bisect_left(LATENCY_BOUNDS, seconds)] += 1


LATENCY_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0)


class _List:
    """A device list as sent; `superseded` is set when there is a newer one."""

    def __init__(self, message: pb.ListAndWatchResponse) -> None:
        self.message = message
        self.superseded = asyncio.Event()


class ResourceServer:
    """Serves one resource for as long as `run` runs.

    `directory` is the kubelet's device plugin directory, `socket_name` the file name of the resource's socket in it.
    The caller watches that directory and notifies `wake` of changes in it.
    """

    def __init__(
        self,
        resource: str,
        directory: str,
        socket_name: str,
        allocator: Allocator,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called after changes of the stage and the problem, and after calls of Allocate.

        Raises `sockets.SocketPathError` if the socket's path is too long.
        """
        self._changed = changed
        self.stage = Stage.WAITING
        self.resource = resource
        self._socket = PluginSocket(directory, socket_name)
        self.problem = ""
        self._reported_at = 0
        self.counters = Counters()
        self._directory = directory
        self._allocator = allocator
        self.wake = Notifier()
        self._list = _List(pb.ListAndWatchResponse())
        self._streams: dict[object, _List | None] = {}  # the list that each stream has sent last
        self.streams_opened = 0
        self._sent = Notifier()
        self._registration = Registration(directory, self._socket, self)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def _enter(self, stage: Stage) -> None:
        if stage is not self.stage:
            self.stage = stage
            self._changed()

    def publish(self, devices: Iterable[Device]) -> None:
        """Sends `devices` to every stream, also if the list is unchanged. Only the latest list is kept.

        If the list is too long, devices that were listed before have precedence.
        """
        devices = list(devices)
        message, left_out = messages.device_list(devices)
        if left_out:
            listed = {device.ID for device in self._list.message.devices}
            message, left_out = messages.device_list(sorted(devices, key=lambda device: device.id not in listed))
            log.error(
                "%s: %d of %d devices left out, the list would exceed the kubelet's limit of %d bytes",
                self.resource, left_out, left_out + len(message.devices), messages.MAX_LIST_BYTES,
            )  # fmt: skip
        old, self._list = self._list, _List(message)
        old.superseded.set()
        log.log(v(4), "%s: new list of %d devices", self.resource, len(message.devices))

    async def withdraw(self) -> None:
        """Sends an empty list to the streams that read within a moment. Call it before ending the server.

        Does nothing if another process serves the resource now.
        """
        if not self._socket.owned:
            return
        self.publish(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHDRAW_TIMEOUT):
                while any(sent is not self._list for sent in self._streams.values()):
                    await self._sent.wait()

    async def run(self) -> None:
        """Serves until cancelled, then removes the socket. Raises `sockets.SocketPathError` if none can be created."""
        try:
            while True:
                await self._wait_until_free()
                await self._serve()
        finally:
            self._enter(Stage.STOPPED)

    async def _wait_until_free(self) -> None:
        """Waits until the directory exists and no other process listens at the socket's path."""
        self._enter(Stage.WAITING)
        start = time.monotonic()
        logged: tuple[str, bool] | None = None
        while problem := self._obstacle():
            self.problem = problem
            overdue = time.monotonic() - start > _TERMINATION_GRACE
            if logged != (problem, overdue):
                logged = (problem, overdue)
                self._changed()
                log.log(logging.ERROR if overdue else logging.WARNING, "%s: %s; waiting", self.resource, problem)
            # The directory's creation notifies; a predecessor that is killed leaves its socket, which does not.
            retry = _BUSY_RETRY_AFTER_GRACE if overdue else _BUSY_RETRY
            await self.wake.wait(retry if sockets.identity(self._directory) else MAX_CHECK_INTERVAL)
        self.problem = ""
        if logged is not None:
            log.info("%s: the wait has ended; taking over %s", self.resource, self._socket.path)

    def _obstacle(self) -> str:
        try:
            mode = os.stat(self._directory).st_mode  # once: the kubelet may create the directory at any time
        except OSError:
            return f"{self._directory} does not exist, expected the kubelet to create it"
        if not stat.S_ISDIR(mode):
            raise sockets.SocketPathError(
                f"{self._directory}: not a directory, expected the kubelet's device plugin directory"
            )
        owner = self._socket.owner()
        if owner is None or self._socket.can_be_taken_over():
            return ""
        process = f"process {owner}" if owner else "another process"
        return f"{self._socket.path} is in use by {process}; end the other plugin for this resource"

    async def _serve(self) -> None:
        """Creates the socket and serves until it or the kubelet's is removed or replaced."""
        server = rpc.RpcServer(self._methods())
        try:
            try:
                await self._socket.create(server)
            except FileNotFoundError:
                # A starting kubelet deleted it, or the directory was removed. The kubelet's own socket may exist by
                # now, so there may be no further notification.
                await self.wake.wait(FIRST_RETRY)
                return
            except OSError as error:
                reason = error.strerror or error
                self.report(
                    f"cannot create the socket {self._socket.path}: {reason}; "
                    "check its directory's mode and SELinux label"
                )
                await self.wake.wait(LAST_RETRY)
                return
            self._enter(Stage.SERVING)
            self.problem = ""
            log.log(v(1), "%s: serving at %s", self.resource, self._socket.path)
            reason = await self._registration.keep()
            log.log(v(1), "%s: %s, starting again", self.resource, reason)
            await self._hand_over()
        finally:
            self._enter(Stage.WAITING)
            self._socket.remove()
            await server.stop()

    async def _hand_over(self) -> None:
        """Answers calls for a moment longer if another process has taken over: its registration takes some time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _HANDOVER
        while (remaining := end - loop.time()) > 0 and not self._socket.owned and self._socket.owner() is not None:
            await self.wake.wait(remaining)

    def record_registration(self, error: rpc.RpcError | None) -> None:
        if error is None:
            self.counters.registrations += 1
            self.problem = ""
        else:
            failures = self.counters.registration_failures
            failures[error.code] = failures.get(error.code, 0) + 1

    def set_registered(self, *, registered: bool) -> None:
        self._enter(Stage.REGISTERED if registered else Stage.SERVING)

    def report(self, problem: str, level: int = logging.WARNING) -> None:
        """Logs a problem once, and again if it changes or its level rises."""
        if problem != self.problem or level > self._reported_at:
            self.problem, self._reported_at = problem, level
            log.log(level, "%s: %s", self.resource, problem)
            self._changed()

    def _methods(self) -> Mapping[str, rpc.Method]:
        service = "/v1beta1.DevicePlugin"
        return {
            f"{service}/GetDevicePluginOptions": _method(self.get_options, pb.Empty, pb.DevicePluginOptions),
            f"{service}/ListAndWatch": rpc.streaming(pb.Empty, pb.ListAndWatchResponse, self._list_and_watch),
            f"{service}/GetPreferredAllocation": _method(
                self._get_preferred, pb.PreferredAllocationRequest, pb.PreferredAllocationResponse
            ),
            f"{service}/Allocate": _method(self._allocate, pb.AllocateRequest, pb.AllocateResponse),
            f"{service}/PreStartContainer": _method(
                self._pre_start, pb.PreStartContainerRequest, pb.PreStartContainerResponse
            ),
        }

    async def get_options(self, _request: pb.Empty, /) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(
            pre_start_required=self._allocator.pre_starts, get_preferred_allocation_available=self._allocator.prefers
        )

    async def _list_and_watch(self, _request: pb.Empty) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        stream = object()
        self._streams[stream] = None
        self.streams_opened += 1
        self.wake.notify_all()
        try:
            while True:
                current = self._list
                # The list of a process that has taken over must stay the last one.
                if self._streams[stream] is not current and self._socket.owned:
                    self.counters.lists_sent += 1
                    self.counters.last_list_time = time.time()
                    yield current.message
                    self._streams[stream] = current
                    self._sent.notify_all()
                await current.superseded.wait()
        finally:
            del self._streams[stream]
            self.wake.notify_all()

    async def _get_preferred(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        start = time.perf_counter()
        response = pb.PreferredAllocationResponse()
        alone = len(request.container_requests) == 1
        try:
            for each in request.container_requests:
                chosen = await self._allocator.preferred_allocation(
                    each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size, alone=alone
                )
                response.container_responses.add(deviceIDs=chosen)
            return response
        finally:
            self.counters.count_preferred_allocation(time.perf_counter() - start)

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        start = time.perf_counter()
        outcome = "plugin-error"
        try:
            response = pb.AllocateResponse()
            alone = len(request.container_requests) == 1
            for container in request.container_requests:
                allocation = await self._allocator.allocate(container.devices_ids, alone=alone)
                response.container_responses.append(messages.container_response(allocation))
            outcome = "ok"
            return response
        except AllocationError as error:
            outcome = error.outcome
            raise
        finally:
            self.counters.count_allocation(time.perf_counter() - start, outcome)
            self._changed()

    async def _pre_start(self, request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        await self._allocator.pre_start(request.devices_ids)
        return pb.PreStartContainerResponse()


def _method(
    answer: Callable[[rpc.Request], Awaitable[rpc.Response]],
    request_type: type[rpc.Request],
    response_type: type[rpc.Response],
) -> rpc.Method:
    """A method whose errors are returned to the kubelet as status UNKNOWN with their text."""

    async def handler(request: rpc.Request) -> rpc.Response:
        try:
            return await answer(request)
        except AllocationError as error:
            log.warning("%s", error)
            raise rpc.RpcError("UNKNOWN", str(error)) from error
        except Exception as error:  # a plugin's own hook may raise anything; the text goes to the pod's events
            log.exception("response to the kubelet failed")
            raise rpc.RpcError("UNKNOWN", f"{type(error).__name__}: {error}") from error

    return rpc.unary(request_type, response_type, handler)
