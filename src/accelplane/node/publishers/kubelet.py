"""Publishes devices to the kubelet: one server for each resource, created and ended as the inventory requires."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection

import msgspec

from accelplane.devices import Inventory
from accelplane.kubelet.server import ResourceServer
from accelplane.kubelet.sockets import SocketPathError
from accelplane.logs import v
from accelplane.node.allocations import CallRecord
from accelplane.node.allocator import ResourceAllocator
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.status import ResourceCounters, ResourceStatus

log = logging.getLogger(__name__)

_RESTART_DELAY = 10.0


class ServedResource:
    """One resource at the kubelet: its server, the allocator that answers for it, and the task that runs the server."""

    def __init__(
        self, server: ResourceServer, allocator: ResourceAllocator, predecessor: asyncio.Task[None] | None
    ) -> None:
        """The server starts when `predecessor`, the task that ends an earlier server of the resource, is done."""
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
                log.exception("%s: server crashed; retrying in %g s", self.server.resource, _RESTART_DELAY)
                await asyncio.sleep(_RESTART_DELAY)


class KubeletPublisher:
    """Keeps the kubelet's lists equal to `DeviceList.listed`."""

    def __init__(
        self, context: PluginContext, cdi: CdiPublisher, unservable: Callable[[SocketPathError], None]
    ) -> None:
        """`unservable` is called for a resource that can never be served because its socket's path is too long."""
        self.served: dict[str, ServedResource] = {}
        self.calls: defaultdict[str, CallRecord] = defaultdict(CallRecord)
        self._context = context
        self._devices = context.devices
        self._cdi = cdi
        self._unservable = unservable
        self._ending: dict[str, asyncio.Task[None]] = {}

    def publish(self, inventory: Inventory) -> None:
        """Adds, updates and removes resources until the lists equal `inventory`."""
        before, self._devices.listed = self._devices.listed.resources, inventory
        for resource in before.keys() - inventory.resources.keys():
            self._remove(resource)
        for resource, devices in inventory.resources.items():
            if devices == before.get(resource):
                continue
            served = self.served.get(resource) or self._add(resource)
            if served is not None:
                served.server.publish(devices.values())
            log.log(
                v(1), "%s: %s/%s devices: %d -> %d (%d unhealthy)",
                self._context.name, self._context.plugin.namespace, resource,
                len(before.get(resource, ())), len(devices), sum(not device.healthy for device in devices.values()),
            )  # fmt: skip

    def resend(self, resources: Collection[str]) -> None:
        """Sends the lists again. For each list that it receives the kubelet writes its checkpoint."""
        for resource in resources:
            if resource in self.served:
                self.served[resource].server.publish(self._devices.listed.resources[resource].values())

    def directory_changed(self) -> None:
        """Notifies every server of a change in the kubelet's directory."""
        for served in self.served.values():
            served.server.wake.notify_all()

    def status(self) -> dict[str, ResourceStatus]:
        """The state of each resource by its name without namespace."""
        return {
            name: ResourceStatus(
                name=served.server.resource,
                stage=served.server.stage,
                problem=served.server.problem,
                devices=self._devices.listed.resources.get(name, {}),
                counters=msgspec.convert(served.server.counters, ResourceCounters, from_attributes=True),
            )
            for name, served in self.served.items()
        }

    async def close(self) -> None:
        """Ends every server; afterwards their sockets are removed."""
        for served in self.served.values():
            served.task.cancel()
        tasks = [served.task for served in self.served.values()]
        await asyncio.gather(*tasks, *self._ending.values(), return_exceptions=True)
        self.served.clear()

    def _add(self, resource: str) -> ServedResource | None:
        plugin, directory = self._context.plugin, self._context.settings.sockets_dir
        name = f"{plugin.namespace}/{resource}"
        allocator = ResourceAllocator(
            name,
            self._context,
            self._cdi,
            self.calls[resource],
            lambda: self._devices.listed.resources.get(resource, {}),
        )
        try:
            server = ResourceServer(
                name, directory, plugin.socket_name(resource), allocator, changed=self._context.changed
            )
        except SocketPathError as error:
            log.error("%s: cannot be served: %s", name, error)
            self._unservable(error)
            return None
        served = self.served[resource] = ServedResource(server, allocator, self._ending.get(resource))
        served.task.add_done_callback(lambda task: self._ended(name, task))
        log.info("%s: new resource", name)
        return served

    def _remove(self, resource: str) -> None:
        served = self.served.pop(resource, None)
        if served is None:
            return
        log.info("%s: no devices left, resource removed", served.server.resource)
        served.allocator.devices = dict
        ending = asyncio.create_task(_end(served, self._ending.get(resource)))
        self._ending[resource] = ending
        ending.add_done_callback(
            lambda task: self._ending.pop(resource) if self._ending.get(resource) is task else None
        )

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SocketPathError):
            log.error("%s: cannot be served: %s", name, error)
            self._unservable(error)
        else:
            log.log(v(1), "%s: server ended", name)


async def _end(served: ServedResource, predecessor: asyncio.Task[None] | None) -> None:
    """Ends a server. `predecessor` still ends an earlier one of the same resource."""
    await served.server.withdraw()
    served.task.cancel()
    tasks = (served.task,) if predecessor is None else (served.task, predecessor)
    await asyncio.gather(*tasks, return_exceptions=True)
