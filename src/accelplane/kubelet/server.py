"""One resource, served to the kubelet: socket, registration and life cycle.

The life is one loop: claim the socket, serve, register, wait for a reason to start again. The reasons are read from
the directory, not from events: own socket gone or replaced, another `kubelet.sock`. When the kubelet's stream ends
while serving, or never opens, the resource is registered again without a new socket. Nothing here ends the process,
and a resource in trouble troubles no other.

What bites (kubelet 1.28 to 1.37): a kubelet that starts deletes every socket in the directory and makes its own after
that; when a stream of the same name ends after a new registration, kubelets up to 1.35 drop the new one, so the old
server must have ended before. Sockets are bound under a passing name and renamed into place: what has the right name
listens already, nobody's live socket is unlinked, and its mode is tight from the start.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from accelplane import rpc
from accelplane.devices import Allocation, Device
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import messages, sockets
from accelplane.kubelet.membership import FIRST_RETRY, LAST_RETRY, LOOK_AT_LEAST, Membership
from accelplane.kubelet.pulse import Pulse
from accelplane.logs import v

log = logging.getLogger(__name__)

KUBELET_SOCKET = "kubelet.sock"
_REGISTER_DEADLINE = 20.0  # the kubelet itself waits up to 10 s for our answer
_BUSY, _BUSY_FOR_LONG = 1.0, 10.0
_TERMINATION_GRACE = 30.0  # Kubernetes' default for a predecessor that is on its way out


class AllocationError(Exception):
    """The request cannot be served; the text reaches the pod's events."""


class Allocator(Protocol):
    """Who answers for a resource's devices. Whatever these raise fails the pod with the error's text."""

    @property
    def prefers(self) -> bool: ...
    @property
    def pre_starts(self) -> bool: ...
    async def allocate(self, ids: Sequence[str]) -> Allocation: ...
    async def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]: ...
    async def pre_start(self, ids: Sequence[str]) -> None: ...


class Stage(StrEnum):
    """Where a resource's server stands; `waiting` names its obstacle in `ResourceServer.problem`."""

    WAITING = "waiting"
    SERVING = "serving"
    REGISTERED = "registered"
    STOPPED = "stopped"


class Counters:
    """What the metrics page shows of one resource; durations in seconds."""

    def __init__(self) -> None:
        self.registrations = 0
        self.registration_failures: dict[str, int] = {}
        self.lists_sent = 0
        self.last_list_time = 0.0
        self.allocations = 0
        self.allocation_failures = 0
        self.allocation_seconds = [0.0] * (len(LATENCY_BOUNDS) + 1)
        self.allocation_seconds_sum = 0.0

    def allocated(self, seconds: float, *, failed: bool) -> None:
        self.allocations += 1
        self.allocation_failures += failed
        self.allocation_seconds_sum += seconds
        bucket = next((index for index, bound in enumerate(LATENCY_BOUNDS) if seconds <= bound), len(LATENCY_BOUNDS))
        self.allocation_seconds[bucket] += 1


LATENCY_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0)


class _List:
    """A device list as sent, until the next one takes its place."""

    def __init__(self, message: pb.ListAndWatchResponse) -> None:
        self.message = message
        self.superseded = asyncio.Event()


class ResourceServer:
    """Serves one resource for as long as `run` runs.

    `directory` is the kubelet's device plugin directory, `endpoint` the file name of the own socket in it. Whoever
    watches that directory fires `wake` when something in it changes.
    """

    def __init__(self, resource: str, directory: str, endpoint: str, allocator: Allocator) -> None:
        """Raises `sockets.SocketPathError` when the socket's path is too long."""
        self.resource = resource
        self.endpoint = endpoint
        self.path = sockets.checked_path(os.path.join(directory, endpoint))
        self.stage = Stage.WAITING
        self.problem = ""
        self._reported_at = 0
        self.counters = Counters()
        self._directory = directory
        self._kubelet = os.path.join(directory, KUBELET_SOCKET)
        self._allocator = allocator
        self.wake = Pulse()
        self._list = _List(pb.ListAndWatchResponse())
        self._streams: dict[object, _List | None] = {}  # what each stream has sent
        self._sent = Pulse()

    def publish(self, devices: Iterable[Device]) -> None:
        """Makes `devices` the list that every stream gets; only the latest list is ever kept."""
        message, left_out = messages.device_list(devices)
        if left_out:
            log.error(
                "%s: %d of %d devices left out, the list would exceed the kubelet's limit of %d bytes",
                self.resource,
                left_out,
                left_out + len(message.devices),
                messages.MAX_LIST_BYTES,
            )
        old, self._list = self._list, _List(message)
        old.superseded.set()
        log.log(v(4), "%s: new list of %d devices", self.resource, len(message.devices))

    async def withdraw(self) -> None:
        """Tells every stream that there are no devices any more, as far as they listen, before the server goes."""
        self.publish(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while any(sent is not self._list for sent in self._streams.values()):
                    await self._sent.wait()

    async def run(self) -> None:
        """Serves until cancelled, then removes the own socket. Raises `sockets.SocketPathError` where none can be."""
        try:
            while True:
                await self._claim()
                await self._serve()
        finally:
            self.stage = Stage.STOPPED

    async def _claim(self) -> None:
        """Waits for the directory to be there and for the socket to be nobody else's."""
        self.stage = Stage.WAITING
        since = time.monotonic()
        warned = ""
        while problem := self._obstacle():
            self.problem = problem
            patience = time.monotonic() - since
            final = patience > _TERMINATION_GRACE
            if warned != problem + str(final):
                warned = problem + str(final)
                log.log(logging.ERROR if final else logging.WARNING, "%s: %s; waiting", self.resource, problem)
            # The directory's appearance wakes; a predecessor that dies leaves its socket, which wakes nobody.
            busy = _BUSY_FOR_LONG if final else _BUSY
            await self.wake.wait(busy if sockets.identity(self._directory) else LOOK_AT_LEAST)
        self.problem = ""

    def _obstacle(self) -> str:
        if not os.path.isdir(self._directory):
            if os.path.exists(self._directory):
                raise sockets.SocketPathError(
                    f"{self._directory}: not a directory, expected the kubelet's sockets there"
                )
            return f"{self._directory} does not exist (is there a kubelet?)"
        owner = sockets.listener(self.path)
        if owner is None:
            return ""
        who = f"process {owner}" if owner else "another process"
        return f"{self.path} is in use by {who}; is a second plugin for this resource running?"

    async def _serve(self) -> None:
        """One life of the socket: from its appearance until it or the kubelet's is gone or replaced."""
        server = rpc.RpcServer(self._methods())
        passing = os.path.join(self._directory, f".{secrets.token_hex(3)}")
        try:
            try:
                await server.start(passing)
                os.chmod(passing, 0o600)
                own = sockets.identity(passing)
                os.replace(passing, self.path)
            except FileNotFoundError:
                # A kubelet that starts swept it away, or the directory is gone; its own socket may be there by now,
                # so that nothing would wake this one.
                await self.wake.wait(FIRST_RETRY)
                return
            except OSError as error:
                reason = error.strerror or error
                self._report(
                    f"cannot make the socket {self.path}: {reason} (permission or SELinux label of the directory?)"
                )
                await self.wake.wait(LAST_RETRY)
                return
            self.stage = Stage.SERVING
            self.problem = ""
            log.log(v(1), "%s: serving at %s", self.resource, self.path)
            try:
                reason = await self._stay_registered(own)
                log.log(v(1), "%s: %s, starting again", self.resource, reason)
            finally:
                if own is not None and sockets.identity(self.path) == own:
                    with contextlib.suppress(OSError):
                        os.unlink(self.path)
        finally:
            self.stage = Stage.WAITING
            await server.stop()
            with contextlib.suppress(OSError):
                os.unlink(passing)

    async def _stay_registered(self, own: sockets.Identity | None) -> str:
        """Registers, again when needed; returns why a new socket is."""
        membership = Membership()
        while True:
            if sockets.identity(self.path) != own:
                return "the socket was removed or replaced"
            kubelet, now = sockets.identity(self._kubelet), time.monotonic()
            if membership.see(kubelet, listening=bool(self._streams), now=now):
                self._report("the kubelet does not listen, registering again", level=v(1))
            if membership.moved:
                return "the kubelet has a new socket"
            if membership.due(now):
                # A kubelet that starts makes its socket before it listens: a first refusal is the ordinary thing.
                level = logging.WARNING if membership.refusals else v(1)
                accepted = await self._register_while(
                    level,
                    lambda at=kubelet: (sockets.identity(self.path), sockets.identity(self._kubelet)) == (own, at),
                )
                membership.tried(time.monotonic(), accepted=accepted)
                continue  # what changed meanwhile has woken nobody
            self.stage = Stage.REGISTERED if membership.registered else Stage.SERVING
            if kubelet is None and not membership.registered:
                self._report(f"waiting for {self._kubelet}", level=v(1))
            await self.wake.wait(membership.next_look(time.monotonic()))

    async def _register_while(self, level: int, makes_sense: Callable[[], bool]) -> bool:
        """Registers, and gives up at once when the sockets change: a kubelet that is ending may never answer."""
        attempt = asyncio.create_task(self._register(level))
        attempt.add_done_callback(lambda _attempt: self.wake.fire())
        try:
            while not attempt.done() and makes_sense():
                await self.wake.wait(LOOK_AT_LEAST)
            return attempt.done() and attempt.result()
        finally:
            attempt.cancel()
            await asyncio.wait((attempt,))

    async def _register(self, level: int) -> bool:
        """Whether the kubelet took it; a refusal is logged at `level`."""
        request = pb.RegisterRequest(
            version=messages.VERSION, endpoint=self.endpoint, resource_name=self.resource, options=self._options()
        )
        async with rpc.Channel(self._kubelet) as channel:
            try:
                await channel.call(messages.REGISTER, request, pb.Empty, deadline=_REGISTER_DEADLINE)
            except rpc.RpcError as error:
                failures = self.counters.registration_failures
                failures[error.code] = failures.get(error.code, 0) + 1
                hint = " (permission or SELinux label?)" if "ermission denied" in error.text else ""
                self._report(f"registration at {self._kubelet} failed: {error}{hint}", level)
                return False
        self.counters.registrations += 1
        self.problem = ""
        log.log(v(1), "%s: registered", self.resource)
        return True

    def _report(self, problem: str, level: int = logging.WARNING) -> None:
        """Logs a problem once, until another takes its place or it becomes a graver one."""
        if problem != self.problem or level > self._reported_at:
            self.problem, self._reported_at = problem, level
            log.log(level, "%s: %s", self.resource, problem)

    def _options(self) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(
            pre_start_required=self._allocator.pre_starts,
            get_preferred_allocation_available=self._allocator.prefers,
        )

    def _methods(self) -> Mapping[str, rpc.Method]:
        service = "/v1beta1.DevicePlugin"
        return {
            f"{service}/GetDevicePluginOptions": _method(self._get_options, pb.Empty, pb.DevicePluginOptions),
            f"{service}/ListAndWatch": rpc.streaming(pb.Empty, pb.ListAndWatchResponse, self._list_and_watch),
            f"{service}/GetPreferredAllocation": _method(
                self._get_preferred, pb.PreferredAllocationRequest, pb.PreferredAllocationResponse
            ),
            f"{service}/Allocate": _method(self._allocate, pb.AllocateRequest, pb.AllocateResponse),
            f"{service}/PreStartContainer": _method(
                self._pre_start, pb.PreStartContainerRequest, pb.PreStartContainerResponse
            ),
        }

    async def _get_options(self, _request: pb.Empty) -> pb.DevicePluginOptions:
        return self._options()

    async def _list_and_watch(self, _request: pb.Empty) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        stream = object()
        self._streams[stream] = None
        self.wake.fire()
        try:
            while True:
                current = self._list
                if self._streams[stream] is not current:
                    self.counters.lists_sent += 1
                    self.counters.last_list_time = time.time()
                    yield current.message
                    self._streams[stream] = current
                    self._sent.fire()
                await current.superseded.wait()
        finally:
            del self._streams[stream]
            self.wake.fire()

    async def _get_preferred(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        for container in request.container_requests:
            chosen = await self._allocator.preferred(
                container.available_deviceIDs, container.must_include_deviceIDs, container.allocation_size
            )
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        start = time.perf_counter()
        failed = True
        try:
            response = pb.AllocateResponse()
            for container in request.container_requests:
                allocation = await self._allocator.allocate(container.devices_ids)
                response.container_responses.append(messages.container_response(allocation))
            failed = False
            return response
        finally:
            self.counters.allocated(time.perf_counter() - start, failed=failed)

    async def _pre_start(self, request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        await self._allocator.pre_start(request.devices_ids)
        return pb.PreStartContainerResponse()


def _method(
    answer: Callable[[rpc.Request], Awaitable[rpc.Response]],
    request_type: type[rpc.Request],
    response_type: type[rpc.Response],
) -> rpc.Method:
    """A method whose errors reach the kubelet as status UNKNOWN with nothing but their text."""

    async def answered(request: rpc.Request) -> rpc.Response:
        try:
            return await answer(request)
        except AllocationError as error:
            log.warning("%s", error)
            raise rpc.RpcError("UNKNOWN", str(error)) from error
        except Exception as error:  # a plugin's own hook may raise anything; the pod must learn of it
            log.exception("answering the kubelet failed")
            raise rpc.RpcError("UNKNOWN", f"{type(error).__name__}: {error}") from error

    return rpc.unary(request_type, response_type, answered)
