"""The embedded kubelet's side of DRA drivers: plugin watcher, registration, connections, and the end of slices.

A socket below `plugins_registry` is a plugin to be registered; its removal ends the registration. The kubelet uses
inotify, here the directory is read periodically. A failed operation is tried again with exponential backoff.
"""

import asyncio
import contextlib
import logging
import os
import random
import stat
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from accelplane.kubelet import dra_v1_pb2 as pb
from accelplane.kubelet import pluginregistration_v1_pb2 as registration_pb
from accelplane.kubelet import sockets
from accelplane.kubelet.embedded.connection import PluginError, call, connect, open_channel
from accelplane.kubelet.embedded.dra_model import ClaimApi, ClaimApiError, DraBehaviour

log = logging.getLogger(__name__)

REGISTRY = "plugins_registry"
_INTERVAL = 0.1  # a kubelet's is 1 s
_DIAL, _GET_INFO, _NOTIFY, _CALL = 10.0, 1.0, 5.0, 45.0
_FIRST_RETRY, _LAST_RETRY = 0.5, 122.0
_FIRST_WIPE_RETRY, _LAST_WIPE_RETRY = 1.0, 300.0
_SERVICE = "/pluginregistration.Registration/"

_Response = TypeVar("_Response", bound=Message)


class DraPlugin:
    """A registered instance of a driver, with its own connection. `service` has the form `v1.DRAPlugin`."""

    def __init__(self, info: registration_pb.PluginInfo, service: str, health_service: str) -> None:
        """Raises `sockets.SocketPathError`."""
        self.driver: str = info.name
        self.endpoint: str = info.endpoint
        self.service = service
        self.health_service = health_service
        self.connected = False
        self.channel = open_channel(info.endpoint, attempt=_DIAL)
        self.tasks: list[asyncio.Task[None]] = []

    async def prepare(self, claims: Collection[pb.Claim]) -> Mapping[str, pb.NodePrepareResourceResponse]:
        """Raises `PluginError`."""
        request = pb.NodePrepareResourcesRequest(claims=claims)
        return (await self._call("NodePrepareResources", request, pb.NodePrepareResourcesResponse)).claims

    async def unprepare(self, claims: Collection[pb.Claim]) -> Mapping[str, pb.NodeUnprepareResourceResponse]:
        """Raises `PluginError`."""
        request = pb.NodeUnprepareResourcesRequest(claims=claims)
        return (await self._call("NodeUnprepareResources", request, pb.NodeUnprepareResourcesResponse)).claims

    async def watch_connection(self, changed: Callable[[], None]) -> None:
        """Keeps the connection open, and records whether it is."""
        while True:
            state = self.channel.get_state(try_to_connect=True)
            self.connected = state == grpc.ChannelConnectivity.READY
            changed()
            await self.channel.wait_for_state_change(state)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()  # the frames of a task have its call, and a call that exists keeps the connection open
        await self.channel.close()

    async def _call(self, method: str, request: Message, response: type[_Response]) -> _Response:
        return await call(
            self.channel, f"/k8s.io.kubelet.pkg.apis.dra.{self.service}/{method}", request, response, _CALL
        )


class _RegistrationError(Exception):
    """A registration that has failed before the plugin was added; it is tried again."""


class DraPlugins:
    """The registered drivers. `watch_health` is started for each plugin whose health the kubelet watches."""

    def __init__(
        self,
        root: str,
        behaviour: DraBehaviour,
        api: ClaimApi,
        *,
        wipe_delay: float,
        watch_health: Callable[[DraPlugin], Coroutine[None, None, None]],
        on_change: Callable[[], None],
    ) -> None:
        """`wipe_delay` is the time in seconds after which the slices of a driver without a plugin are deleted."""
        self._registry = os.path.join(root, REGISTRY)
        self._behaviour = behaviour
        self._api = api
        self._wipe_delay = wipe_delay
        self._watch_health = watch_health
        self._on_change = on_change
        self._by_driver: dict[str, list[DraPlugin]] = {}
        # The sockets that need no registration; without a plugin it has failed.
        self._known: dict[str, tuple[sockets.Identity, DraPlugin | None]] = {}
        self._registering: set[str] = set()
        self._retries: dict[str, tuple[float, float]] = {}  # by socket: time, and the delay after it
        self._wipes: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts the watcher, and deletes the slices of all drivers of this node. Raises `OSError`."""
        os.makedirs(self._registry, mode=0o750, exist_ok=True)
        self._spawn(self._wipe(""))
        self._spawn(self._watch())

    async def close(self) -> None:
        for wipe in self._wipes.values():
            wipe.cancel()
        self._wipes.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(plugin.close() for plugins in self._by_driver.values() for plugin in plugins))
        self._by_driver.clear()
        self._known.clear()
        self._registering.clear()
        self._retries.clear()

    def names(self) -> tuple[str, ...]:
        """The names of the registered drivers."""
        return tuple(sorted(self._by_driver))

    def find(self, driver: str) -> DraPlugin:
        """The plugin to call: the last one that is connected. Raises `PluginError` if none is registered."""
        plugins = self._by_driver.get(driver, [])
        for plugin in reversed(plugins):
            if plugin.connected:
                return plugin
        if not plugins:
            raise PluginError(f"DRA driver {driver} is not registered")
        return plugins[-1]

    async def _watch(self) -> None:
        while True:
            desired = dict(_sockets_below(self._registry))
            for path, (identity, plugin) in [*self._known.items()]:
                if desired.get(path) != identity:
                    del self._known[path]
                    if plugin is not None:
                        await self._remove(plugin)
            now = asyncio.get_running_loop().time()
            for path, identity in desired.items():
                due = self._retries.get(path, (0.0, 0.0))[0] <= now
                if path not in self._known and path not in self._registering and due:
                    self._registering.add(path)
                    self._spawn(self._register_with_backoff(path, identity))
            await asyncio.sleep(_INTERVAL)

    async def _register_with_backoff(self, path: str, identity: sockets.Identity) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._register(path, identity)
            self._retries.pop(path, None)
        except (_RegistrationError, PluginError, sockets.SocketPathError) as error:
            log.warning("%s: %s", path, error)
            delay = min(2 * self._retries[path][1], _LAST_RETRY) if path in self._retries else _FIRST_RETRY
            self._retries[path] = (loop.time() + delay, delay)
        finally:
            self._registering.discard(path)

    async def _register(self, path: str, identity: sockets.Identity) -> None:
        """Raises `_RegistrationError`, `PluginError`, `sockets.SocketPathError`."""
        channel = open_channel(path, attempt=_DIAL)
        try:
            await connect(channel, _DIAL)
            request = registration_pb.InfoRequest()
            info = await call(channel, f"{_SERVICE}GetInfo", request, registration_pb.PluginInfo, _GET_INFO)
            if info.type != "DRAPlugin":
                error = f"no handler registered for plugin type: {info.type} at socket {path}"
                await _notify(channel, f"RegisterPlugin error -- {error}")
            info.endpoint = info.endpoint or path
            service = next((each for each in info.supported_versions if each in self._behaviour.services), None)
            if service is None:
                error = (
                    f"invalid supported gRPC versions of DRA driver plugin {info.name} at endpoint {info.endpoint}: "
                    f"none of services supported by the plugin ({list(info.supported_versions)}) are supported by the "
                    f"kubelet ({list(self._behaviour.services)})"
                )
                await _notify(channel, f"RegisterPlugin error -- plugin validation failed with err: {error}")
            assert service is not None  # noqa: S101 - `_notify` raises
            await self._add(channel, path, identity, DraPlugin(info, service, self._health_service(info)))
        finally:
            await channel.close()

    async def _add(self, channel: grpc.aio.Channel, path: str, identity: sockets.Identity, plugin: DraPlugin) -> None:
        plugins = self._by_driver.setdefault(plugin.driver, [])
        if any(other.endpoint == plugin.endpoint for other in plugins):
            await plugin.close()
            if not self._behaviour.retries_registration:
                self._known[path] = identity, None
            error = f"endpoint {plugin.endpoint} already registered for DRA driver plugin {plugin.driver}"
            await _notify(channel, f"RegisterPlugin error -- plugin registration failed with err: {error}")
        self._known[path] = identity, plugin
        plugins.append(plugin)
        if self._behaviour.keeps_connections:
            plugin.tasks.append(asyncio.create_task(plugin.watch_connection(lambda: self._sync(plugin.driver))))
        else:
            plugin.connected = True
        if self._behaviour.watches_health and plugin.health_service:
            plugin.tasks.append(asyncio.create_task(self._watch_health(plugin)))
        self._sync(plugin.driver)
        try:
            await _notify(channel, "")
        except PluginError:
            if self._behaviour.retries_registration:
                self._known.pop(path, None)
                await self._remove(plugin)
            raise

    def _health_service(self, info: registration_pb.PluginInfo) -> str:
        if not self._behaviour.health_services:
            return "v1alpha1.DRAResourceHealth"
        return next((each for each in self._behaviour.health_services if each in info.supported_versions), "")

    async def _remove(self, plugin: DraPlugin) -> None:
        plugins = self._by_driver.get(plugin.driver, [])
        if plugin in plugins:
            plugins.remove(plugin)
        if not plugins:
            self._by_driver.pop(plugin.driver, None)
        self._sync(plugin.driver)
        await plugin.close()

    def _sync(self, driver: str) -> None:
        """Starts or cancels the deletion of a driver's slices."""
        usable = any(plugin.connected for plugin in self._by_driver.get(driver, ()))
        if usable and (wipe := self._wipes.pop(driver, None)):
            wipe.cancel()
        elif not usable and driver not in self._wipes:
            loop = asyncio.get_running_loop()
            self._wipes[driver] = loop.call_later(self._wipe_delay, self._begin_wipe, driver)
        self._on_change()

    def _begin_wipe(self, driver: str) -> None:
        del self._wipes[driver]
        self._spawn(self._wipe(driver))

    async def _wipe(self, driver: str) -> None:
        delay = _FIRST_WIPE_RETRY
        while True:
            try:
                await self._api.delete_slices(driver)
                return
            except ClaimApiError as error:
                log.warning("deleting ResourceSlices failed: %s", error)
            await asyncio.sleep(delay * random.uniform(1.0, 1.2))  # noqa: S311 - no secret
            delay = min(2 * delay, _LAST_WIPE_RETRY)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _notify(channel: grpc.aio.Channel, error: str) -> None:
    """Reports the status of a registration. Raises `_RegistrationError` with the error that it has reported."""
    status = registration_pb.RegistrationStatus(plugin_registered=not error, error=error)
    await call(
        channel, f"{_SERVICE}NotifyRegistrationStatus", status, registration_pb.RegistrationStatusResponse, _NOTIFY
    )
    if error:
        raise _RegistrationError(error)


def _sockets_below(directory: str) -> Iterator[tuple[str, sockets.Identity]]:
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if not name.startswith(".") and stat.S_ISSOCK(os.lstat(path).st_mode):
                    identity = sockets.identity(path)
                    if identity is not None:
                        yield path, identity
