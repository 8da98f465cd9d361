"""Serves one DRA driver to the kubelet: its two sockets, registration, and life cycle.

The life cycle is level-based: each change in the kubelet's directories, at the connections or of the registration's
status starts one pass, which creates what is missing. A pass serves the service socket, checks that no other driver has
the name, creates the registration socket, and takes the lock for publishing. `registration_policy` decides when the
registration socket is created again.

Two instances of a driver serve at once during an update. Only the one with the lock publishes slices. An instance that
stops releases the lock, serves until the kubelet has no call in progress, and removes its registration socket.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from accelplane import rpc
from accelplane.apiserver.clock import loop_time
from accelplane.dra.claim_calls import ClaimCalls, Counters
from accelplane.dra.driversocket import DriverSocket, driver_paths, remove_stale
from accelplane.dra.events import Reason
from accelplane.dra.health_stream import HealthStreams
from accelplane.dra.model import ClaimPreparer, ClaimRef, DeviceHealth, error_line
from accelplane.dra.publish_lock import PublishLock
from accelplane.dra.registration_policy import RegistrationPolicy, Version
from accelplane.dra.registrations import GET_INFO, IDENTIFY, PLUGIN_TYPE, OtherRegistrations
from accelplane.dra.validation import is_subdomain
from accelplane.kubelet import pluginregistration_v1_pb2 as pb
from accelplane.kubelet import sockets
from accelplane.kubelet.notifier import Notifier
from accelplane.logs import v

log = logging.getLogger(__name__)

# The kubelet uses the first one of DRAPlugin that it knows.
SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
_NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
CHECK_INTERVAL = 30.0  # finds lost sockets where inotify is missing
_LOCK_RETRY, _OBSTACLE_RETRY, _ERROR_RETRY = 1.0, 2.0, 10.0
_DRAIN_LIMIT = 25.0
_HANDOVER = 2.0  # the kubelet finds a removed registration socket within a second
_POLL = 0.1
_HEALTH_REPEATS, _HEALTH_REPEAT_INTERVAL = 6, 5.0
_MAX_DRIVER = 63

Stage = Literal["waiting", "serving", "registered", "stopped"]


class DriverStatus(Struct, frozen=True, kw_only=True):
    """What `inspect` shows of a driver. `problem` is why it is not registered, or the kubelet's last error.

    `publishing`: this instance may write slices. `connections` are those at the service socket.
    """

    driver: str
    stage: Stage
    problem: str
    endpoint: str
    publishing: bool
    connections: int
    health_streams: int
    other_instances: Sequence[str]


class DriverService:
    """Serves one driver while `run` runs.

    The caller watches `directories` and notifies `wake` of changes in them.
    """

    def __init__(
        self,
        driver: str,
        kubelet_dir: str,
        preparer: ClaimPreparer,
        health: Callable[[], Sequence[DeviceHealth]],
        health_changed: Notifier,
        *,
        pool: str,
        kubelet_version: Callable[[], Version | None],
        registered: Callable[[bool], None],
        on_event: Callable[[Reason, str, ClaimRef | None], None] = lambda _reason, _text, _claim: None,
        instance: str = "",
        check_interval: Callable[[], float] = lambda: CHECK_INTERVAL,
    ) -> None:
        """`pool` is the pool of the devices of `health`. `instance` is the pod's UID, "" for the only instance.

        `registered` is called with True when this instance may publish slices, again after each registration by the
        kubelet, and with False when it may no longer. `on_event` gets reason and text of events, about the node or a
        claim. `check_interval` has the seconds between passes without events: long if the caller's watches miss none.
        Raises `ValueError`, also `sockets.SocketPathError`.
        """
        if not is_subdomain(driver, _MAX_DRIVER):
            raise ValueError(f"driver name {driver!r}: expected a DNS subdomain of at most {_MAX_DRIVER} characters")
        self.driver = driver
        self.wake = Notifier()
        self._paths = driver_paths(driver, kubelet_dir, instance)
        self._version = kubelet_version
        self._registered = registered
        self._check_interval = check_interval
        self._on_event = on_event
        self._health_changed = health_changed
        self._claims = ClaimCalls(driver, preparer, on_event)
        self._health = HealthStreams(pool, health, health_changed, kubelet_version)
        self._policy = RegistrationPolicy()
        self._others = OtherRegistrations(self._paths.registry, driver)
        self._instances: tuple[str, ...] = ()  # endpoints of other instances
        self._health_repeats: asyncio.Task[None] | None = None
        self._lock = PublishLock(self._paths.directory)
        self._service, self._registration = DriverSocket(self._paths.service), DriverSocket(self._paths.registration)
        self._service_server, self._registration_server = rpc.RpcServer({}), rpc.RpcServer({})
        self._publishing = False
        self._stopping = False
        self._stage: Stage = "waiting"
        self._problem = ""

    @property
    def directories(self) -> tuple[str, str]:
        """The directories of the sockets. They may not exist yet."""
        return self._paths.registry, self._paths.directory

    @property
    def counters(self) -> Counters:
        return self._claims.counters

    @property
    def status(self) -> DriverStatus:
        return DriverStatus(
            driver=self.driver,
            stage=self._stage,
            problem=self._problem,
            endpoint=self._paths.service,
            publishing=self._publishing,
            connections=self._service_server.connections,
            health_streams=self._health.open,
            other_instances=self._instances,
        )

    def stop(self) -> None:
        """Ends `run`, after the calls in progress have ended or after 25 s."""
        self._stopping = True
        self.wake.notify_all()

    async def run(self) -> None:
        """Serves until `stop`. A cancellation ends calls in progress; their work goes on in the preparer."""
        try:
            while not self._stopping:
                count = self.wake.count
                delay = await self._reconcile()
                if self.wake.count == count:
                    await self.wake.wait(delay)
            await self._drain()
        finally:
            if self._health_repeats is not None:
                self._health_repeats.cancel()
            self._set_publishing(False, again=False)
            self._lock.release()
            self._service.remove()
            self._registration.remove()
            self._stage = "stopped"
            await self._registration_server.stop(0)
            await self._service_server.stop(0)

    async def _reconcile(self) -> float:
        """One pass. Returns the seconds until the next one if nothing happens."""
        if not self._has_registry():
            await self._withdraw()
            self._report(f"{self._paths.registry} does not exist, expected the kubelet to create it", level=v(1))
            return self._check_interval()
        try:
            await self._serve()
            if problem := await self._obstacle():
                await self._withdraw()
                self._report(problem, reason="DriverNameInUse")
                return _OBSTACLE_RETRY
            await self._register()
            return self._update_registered()
        except OSError as error:
            self._report(
                f"cannot create the sockets {self._paths.registration} and {self._paths.service} and the lock beside "
                f"it: {error.strerror or error}; check the mode and SELinux label of their directories"
            )
            return _ERROR_RETRY

    def _has_registry(self) -> bool:
        return os.path.isdir(self._paths.registry)

    async def _serve(self) -> None:
        """Serves the service socket. Raises `OSError`."""
        if self._service.owned:
            return
        os.makedirs(self._paths.directory, mode=0o750, exist_ok=True)
        if sockets.listener(self._service.path) is not None:
            return  # of another process, see `_obstacle`
        remove_stale(self._paths, self.driver)
        await self._service_server.stop(0)
        methods = {**self._claims.methods(), **self._health.methods()}
        self._service_server = rpc.RpcServer(methods, connections_changed=self._on_connections)
        await self._service.create(self._service_server)
        log.log(v(1), "%s: serving at %s", self.driver, self._service.path)

    async def _obstacle(self) -> str:
        """Why this instance must not be registered. Empty if it may."""
        for own in (self._service, self._registration):
            if not own.owned and (owner := sockets.listener(own.path)) is not None:
                process = f"process {owner}" if owner else "another process"
                return f"{own.path} is in use by {process}; end the other instance of the driver"
        others = await self._others.update(self._paths.registration)
        instances = tuple(other.endpoint for other in others if other.ours)
        if set(self._instances) - set(instances):
            self._repeat_health()
        self._instances = instances
        for other in others:
            if not other.ours:
                pid = sockets.listener(other.path)
                process = f"process {pid}" if pid else "another process"
                return (
                    f"{process} is registered as {self.driver} with the socket {other.path} and serves at "
                    f"{other.endpoint}; remove the other DRA driver"
                )
        return ""

    async def _register(self) -> None:
        """Creates the registration socket if it is missing or must be created again. Raises `OSError`."""
        now = loop_time()
        recreate = self._policy.should_recreate(now, self._version())
        if self._registration.owned and not recreate:
            return
        old = self._registration_server
        self._registration_server = rpc.RpcServer(self._registration_methods())
        await self._registration.create(self._registration_server)
        await old.stop()
        self._policy.record_created(now, again=recreate)
        if not recreate:
            self._problem = ""
        log.log(v(1), "%s: waiting for registration at %s", self.driver, self._registration.path)

    def _update_registered(self) -> float:
        """Publishes while registered. Returns the seconds until the next pass. Raises `OSError` without a lock file."""
        now, version = loop_time(), self._version()
        waits = [CHECK_INTERVAL if self._others.need_polling else self._check_interval()]
        registered = self._policy.is_registered(version)
        if registered and not self._lock.acquire():
            waits.append(_LOCK_RETRY)
        self._stage = "registered" if registered else "serving"
        self._set_publishing(registered and self._lock.held, again=False)
        if self._others.retry is not None:
            waits.append(self._others.retry)
        if (due := self._policy.next_check(now, version)) is not None:
            waits.append(due)
        return min(waits)

    def _set_publishing(self, publishing: bool, *, again: bool) -> None:
        if publishing != self._publishing or (publishing and again):
            self._publishing = publishing
            self._registered(publishing)

    async def _withdraw(self) -> None:
        """Ends the registration. The kubelet finds that the socket is removed."""
        self._registration.remove()
        self._set_publishing(False, again=False)
        self._lock.release()
        self._policy = RegistrationPolicy()
        self._stage = "waiting"
        server, self._registration_server = self._registration_server, rpc.RpcServer({})
        await server.stop()

    async def _drain(self) -> None:
        """Lets another instance publish, and ends the registration when no call is in progress.

        The kubelet cancels its calls when it finds that the registration socket is removed. It calls the instance that
        has registered last, so this one becomes idle. Then the kubelet has some time to close its connections.
        """
        self._set_publishing(False, again=False)
        self._lock.release()
        end = loop_time() + _DRAIN_LIMIT
        await self._wait_while(lambda: self._claims.running > 0, end)
        await self._withdraw()
        await self._wait_while(lambda: self._service_server.connections > 0, min(end, loop_time() + _HANDOVER))
        await self._wait_while(lambda: self._claims.running > 0, end)
        if running := self._claims.running:
            log.warning("%s: stopped with %d calls of the kubelet in progress", self.driver, running)

    async def _wait_while(self, condition: Callable[[], bool], end: float) -> None:
        while condition() and loop_time() < end:
            await self.wake.wait(min(_POLL, end - loop_time()))

    def _registration_methods(self) -> Mapping[str, rpc.Method]:
        return {
            GET_INFO: rpc.unary(pb.InfoRequest, pb.PluginInfo, self._get_info),
            _NOTIFY: rpc.unary(pb.RegistrationStatus, pb.RegistrationStatusResponse, self._notify),
            IDENTIFY: rpc.unary(pb.InfoRequest, pb.RegistrationStatusResponse, self._identify),
        }

    async def _get_info(self, _request: pb.InfoRequest) -> pb.PluginInfo:
        return pb.PluginInfo(
            type=PLUGIN_TYPE,
            name=self.driver,
            endpoint=self._paths.service,
            supported_versions=SUPPORTED_VERSIONS,
        )

    async def _notify(self, status: pb.RegistrationStatus) -> pb.RegistrationStatusResponse:
        accepted = status.plugin_registered
        self._policy.record_status(loop_time(), accepted=accepted, version=self._version())
        if accepted:
            self._problem = ""
            log.log(v(1), "%s: registered", self.driver)
            # A kubelet that has started has deleted the slices: they are checked after each registration.
            self._set_publishing(self._publishing, again=True)
        else:
            text = f"the kubelet has rejected the registration: {error_line(status.error)}"
            self._report(text, reason="RegistrationRejected")
        self.wake.notify_all()
        return pb.RegistrationStatusResponse()

    async def _identify(self, _request: pb.InfoRequest) -> pb.RegistrationStatusResponse:
        return pb.RegistrationStatusResponse()

    def _on_connections(self) -> None:
        self._policy.observe_connections(loop_time(), self._service_server.connections)
        self.wake.notify_all()

    def _repeat_health(self) -> None:
        """Repeats the health for 30 s: the kubelet discards it when the stream of another instance ends."""
        if self._health_repeats is None or self._health_repeats.done():
            self._health_repeats = asyncio.create_task(self._repeat())

    async def _repeat(self) -> None:
        for _ in range(_HEALTH_REPEATS):
            await asyncio.sleep(_HEALTH_REPEAT_INTERVAL)
            self._health_changed.notify_all()

    def _report(self, problem: str, level: int = logging.WARNING, reason: Reason | None = None) -> None:
        """Logs a problem once, and again if it changes. With `reason` it is an event, too."""
        if problem != self._problem:
            self._problem = problem
            log.log(level, "%s: %s", self.driver, problem)
            if reason is not None:
                self._on_event(reason, problem, None)
