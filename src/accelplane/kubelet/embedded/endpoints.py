"""The kubelet's side of plugins: registration, ListAndWatch streams, and the grace period after a disconnect.

A kubelet keeps two records of its connections: the clients whose end it handles, and the endpoints that it calls. Until
1.36 both identify a plugin by its resource, since 1.37 by its resource and the path of its socket. The records differ
after some failures, and the defects that this causes are modelled, too: see docs/kubelet-defects.md.
"""

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

import grpc.aio

from accelplane.devices import HEALTHY, UNHEALTHY, ResourceNameError, check_resource_name, natural
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import messages, sockets
from accelplane.kubelet.embedded.connection import PluginConnection, PluginError
from accelplane.kubelet.embedded.model import ACCEPTED, DeviceStatus, PluginOptions, Registration
from accelplane.kubelet.embedded.service import service

log = logging.getLogger(__name__)

# Bounds the memory when a plugin registers in a loop.
_REGISTRATIONS_KEPT = 10_000
_Result = TypeVar("_Result")


class Endpoint:
    """A resource that has been registered.

    `devices` is None until the first list. `connected` are all plugins of the resource by path; only one has the key ""
    if the kubelet identifies plugins by resource. `connection` is the one that is called, None without one; `options`
    are then those of the last plugin. `expired` is set at the end of the grace period.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.devices: Mapping[str, DeviceStatus] | None = None
        self.connection: PluginConnection | None = None
        self.options = PluginOptions()
        self.connected: dict[str, tuple[PluginConnection, PluginOptions]] = {}
        self.expired = False
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def listed(self) -> bool:
        """Whether the kubelet counts the resource as one of a device plugin."""
        return self.devices is not None and not self.expired

    def plugin(self) -> PluginConnection:
        """The connection. Raises `PluginError` if no plugin is connected."""
        if self.connection is None:
            raise PluginError(f"endpoint {self.name} has been stopped")
        return self.connection


class _RegistrationError(Exception):
    """A rejected registration; the text is the error that the plugin gets."""


class Endpoints:
    """All resources by name. `on_list` is called after each list and loss, `on_registration` after each `Register`."""

    def __init__(
        self,
        directory: str,
        *,
        grace: float,
        connect_timeout: float,
        call_timeout: float,
        identified_by_path: bool,
        on_list: Callable[[], None],
        on_registration: Callable[[], None],
    ) -> None:
        self.by_name: dict[str, Endpoint] = {}
        self.registrations: Sequence[Registration] = ()
        self._directory = directory
        self._grace = grace
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._identified_by_path = identified_by_path
        self._on_list = on_list
        self._on_registration = on_registration
        self._registered = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._connections: set[PluginConnection] = set()
        self._clients: dict[tuple[str, str], list[PluginConnection]] = {}

    def restore(self, names: Iterable[str]) -> None:
        """Replaces all endpoints by those of a checkpoint, with 0 devices until their plugins register."""
        self.by_name = {}
        self._clients.clear()
        for name in names:
            endpoint = self.by_name[name] = Endpoint(name)
            endpoint.devices = {}
            self._start_grace(endpoint)

    async def close(self) -> None:
        for endpoint in self.by_name.values():
            if endpoint.expiry is not None:
                endpoint.expiry.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The Registration service."""

        async def register(
            request: pb.RegisterRequest, context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.Empty]
        ) -> pb.Empty:
            registration = self._spawn(self._register(request))
            # The plugin may have cancelled the call when the registration fails.
            registration.add_done_callback(lambda task: task.cancelled() or task.exception())
            # Until 1.36 a kubelet completes a registration even if the plugin cancels the call.
            outcome = await (registration if self._identified_by_path else asyncio.shield(registration))
            if outcome != ACCEPTED:
                await context.abort(grpc.StatusCode.UNKNOWN, outcome)
            return pb.Empty()

        return service("v1beta1.Registration", {"Register": (register, pb.RegisterRequest)})

    async def _register(self, request: pb.RegisterRequest) -> str:
        options = None
        outcome = ACCEPTED
        try:
            _check(request)
            options = await self._connect(request)
        except _RegistrationError as error:
            outcome = str(error)
            log.warning("registration of %s at %s rejected: %s", request.resource_name, request.endpoint, outcome)
        self._registered += 1
        record = Registration(
            number=self._registered,
            resource=request.resource_name,
            endpoint=request.endpoint,
            version=request.version,
            announced=PluginOptions.of(request.options),
            options=options,
            outcome=outcome,
        )
        self.registrations = (*self.registrations[1 - _REGISTRATIONS_KEPT :], record)
        self._on_registration()
        return outcome

    async def _connect(self, request: pb.RegisterRequest) -> PluginOptions:
        """Connects to the plugin, which then replaces an earlier one of the resource."""
        # As in Go, an absolute endpoint is joined to the directory.
        path = f"{self._directory}/{request.endpoint}"
        try:
            connection = PluginConnection(request.resource_name, path, call_timeout=self._call_timeout)
        except sockets.SocketPathError as error:
            raise _RegistrationError(f"failed to dial device plugin: {error}") from error
        self._connections.add(connection)
        key = self._key(connection)
        others = self._clients.get(key, []) if self._identified_by_path else []
        self._clients[key] = [*others, connection]
        try:
            try:
                await connection.connect(self._connect_timeout)
            except PluginError as error:
                raise _RegistrationError(f"failed to dial device plugin: {error}: {path}") from error
            try:
                options = PluginOptions.of(await connection.options())
            except PluginError as error:
                raise _RegistrationError(f"failed to get device plugin options: {error}") from error
            self._on_connect(connection, options)
        except BaseException:
            # This also removes the client of an earlier registration, whose end is then not handled.
            self._clients.pop(key, None)
            await self._close_connection(connection)
            raise
        self._spawn(self._watch(connection))
        return options

    def _key(self, connection: PluginConnection) -> tuple[str, str]:
        """What identifies a plugin: its resource and, since 1.37, the path of its socket."""
        return connection.resource, connection.path if self._identified_by_path else ""

    def _on_connect(self, connection: PluginConnection, options: PluginOptions) -> None:
        """Uses the plugin for the calls of its resource. Raises `_RegistrationError`."""
        name, path = self._key(connection)
        endpoint = self.by_name.setdefault(name, Endpoint(name))
        if self._identified_by_path and path in endpoint.connected:
            raise _RegistrationError(f"device plugin already connected: {path}")
        endpoint.connected[path] = connection, options
        endpoint.connection, endpoint.options = connection, options
        if endpoint.expiry is not None:
            endpoint.expiry.cancel()
            endpoint.expiry = None

    async def _watch(self, connection: PluginConnection) -> None:
        """Receives one plugin's lists until the stream ends."""
        reason = "the plugin ended it"
        try:
            async for message in connection.list_and_watch():
                self._update_devices(self.by_name[connection.resource], message)
        except PluginError as error:
            reason = str(error)
        log.info("ListAndWatch of %s ended: %s", connection.resource, reason)
        # The client that is recorded now, which may be the one of a later registration.
        if clients := self._clients.pop(self._key(connection), None):
            self._on_disconnect(clients[0])
            await self._close_connection(clients[0])
        await self._close_connection(connection)

    def _update_devices(self, endpoint: Endpoint, message: pb.ListAndWatchResponse) -> None:
        devices = {
            device.ID: DeviceStatus(
                HEALTHY if device.health == HEALTHY else UNHEALTHY,
                tuple(dict.fromkeys(node.ID for node in device.topology.nodes)),
            )
            for device in message.devices
        }
        endpoint.expired = False
        endpoint.devices = {key: devices[key] for key in sorted(devices, key=natural)}
        self._on_list()

    def _on_disconnect(self, connection: PluginConnection) -> None:
        """Uses another plugin of the resource; without one, marks the devices Unhealthy and starts the grace period."""
        name, path = self._key(connection)
        endpoint = self.by_name[name]
        if endpoint.connected.pop(path, None) is None:
            return
        if endpoint.connected:
            endpoint.connection, endpoint.options = next(iter(endpoint.connected.values()))
            return
        endpoint.connection = None
        if endpoint.devices is not None:
            endpoint.devices = {key: device._replace(health=UNHEALTHY) for key, device in endpoint.devices.items()}
        self._start_grace(endpoint)
        self._on_list()

    def _start_grace(self, endpoint: Endpoint) -> None:
        endpoint.expiry = asyncio.get_running_loop().call_later(self._grace, self._expire, endpoint)

    def _expire(self, endpoint: Endpoint) -> None:
        log.info("%s: no plugin for %g s, resource removed", endpoint.name, self._grace)
        endpoint.expiry = None
        endpoint.expired = True
        if endpoint.devices is not None:
            endpoint.devices = {}
        self._on_list()

    async def _close_connection(self, connection: PluginConnection) -> None:
        self._connections.discard(connection)
        await connection.close()

    def _spawn(self, work: Coroutine[object, object, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check(request: pb.RegisterRequest) -> None:
    """Checks a registration. Raises `_RegistrationError` with the kubelet's text."""
    if request.version != messages.VERSION:
        raise _RegistrationError(
            f'requested API version "{request.version}" is not supported by kubelet. '
            f'Supported version is ["{messages.VERSION}"]'
        )
    namespace, _, name = request.resource_name.partition("/")
    try:
        check_resource_name(namespace, name)
    except ResourceNameError as error:
        raise _RegistrationError(f'the ResourceName "{request.resource_name}" is invalid: {error}') from error


def remove_sockets(directory: str) -> None:
    """Removes every socket of a directory, as a kubelet does at its start, and nothing else."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a plugin renames its socket
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    os.unlink(entry.path)
