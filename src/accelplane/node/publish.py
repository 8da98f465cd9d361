"""The kubelet's side of one plugin: a server for each resource, made and ended as the devices want it."""

import asyncio
import logging
from collections.abc import Callable

from accelplane.devices import Changes, Inventory
from accelplane.kubelet.server import ResourceServer
from accelplane.kubelet.sockets import SocketPathError
from accelplane.logs import v
from accelplane.node.allocation import ResourceAllocator
from accelplane.node.cdi import CdiDirectory
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

_RESTART_AFTER = 10.0


class Served:
    """One resource at the kubelet: its server, who answers for it, and the task that runs it."""

    def __init__(
        self, server: ResourceServer, allocator: ResourceAllocator, predecessor: asyncio.Task[None] | None
    ) -> None:
        """`predecessor` still ends a server of the same resource; this one waits for it."""
        self.server = server
        self.allocator = allocator
        self.task = asyncio.create_task(self._run(predecessor))

    async def _run(self, predecessor: asyncio.Task[None] | None) -> None:
        if predecessor is not None:
            await asyncio.wait((predecessor,))
        while True:
            try:
                await self.server.run()
            except SocketPathError:
                raise
            except Exception:
                log.exception(
                    "%s: serving ended by a fault of this program, again in %g s", self.server.resource, _RESTART_AFTER
                )
                await asyncio.sleep(_RESTART_AFTER)


class Publisher:
    """Keeps the kubelet's view equal to the last inventory given to `publish`."""

    def __init__(
        self,
        plugin: Plugin[Config],
        sockets_directory: str,
        cdi: CdiDirectory,
        failed: Callable[[SocketPathError], None],
    ) -> None:
        """`failed` is told of resources that can never be served (a socket path that is too long)."""
        self.inventory = Inventory()
        self.served: dict[str, Served] = {}
        self._plugin = plugin
        self._directory = sockets_directory
        self._cdi = cdi
        self._failed = failed
        self._ending: dict[str, asyncio.Task[None]] = {}

    def replace_plugin(self, plugin: Plugin[Config]) -> None:
        """Further requests are answered by `plugin`."""
        self._plugin = plugin
        for served in self.served.values():
            served.allocator.plugin = plugin

    def publish(self, inventory: Inventory) -> Changes:
        """Adds, updates and removes resources until the kubelet's view is `inventory`; returns what that took."""
        changes = Changes.between(self.inventory, inventory)
        self.inventory = inventory
        for resource in changes.removed:
            self._remove(resource)
        for resource in (*changes.added, *changes.updated):
            devices = inventory.resources[resource]
            served = self.served.get(resource) or self._add(resource)
            if served is not None:
                served.allocator.devices = devices
                served.server.publish(devices.values())
        return changes

    def directory_changed(self) -> None:
        """Tells every server that something in the kubelet's directory came or went."""
        for served in self.served.values():
            served.server.wake.fire()

    async def close(self) -> None:
        """Ends every server; their sockets are gone afterwards."""
        for served in self.served.values():
            served.task.cancel()
        tasks = [served.task for served in self.served.values()]
        await asyncio.gather(*tasks, *self._ending.values(), return_exceptions=True)
        self.served.clear()

    def _add(self, resource: str) -> Served | None:
        name = f"{self._plugin.namespace}/{resource}"
        allocator = ResourceAllocator(name, self._plugin, self._cdi)
        try:
            server = ResourceServer(name, self._directory, self._plugin.socket_name(resource), allocator)
        except SocketPathError as error:
            log.error("%s: cannot be served: %s", name, error)
            self._failed(error)
            return None
        served = self.served[resource] = Served(server, allocator, self._ending.get(resource))
        served.task.add_done_callback(lambda task: self._ended(name, task))
        log.info("%s: new resource", name)
        return served

    def _remove(self, resource: str) -> None:
        served = self.served.pop(resource, None)
        if served is None:
            return
        log.info("%s/%s: no devices any more, resource withdrawn", self._plugin.namespace, resource)
        served.allocator.devices = {}
        ending = self._ending[resource] = asyncio.create_task(_end(served))
        ending.add_done_callback(
            lambda task: self._ending.pop(resource) if self._ending.get(resource) is task else None
        )

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SocketPathError):
            log.error("%s: cannot be served: %s", name, error)
            self._failed(error)
        else:
            log.log(v(1), "%s: no longer served", name)


async def _end(served: Served) -> None:
    await served.server.withdraw()
    served.task.cancel()
    await asyncio.gather(served.task, return_exceptions=True)
