"""The input of the metrics page: measurements, readings and holders, read when a page is requested."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from accelplane.host.blocking import ThreadQueue
from accelplane.node.agent import Agent
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.pages.activity import Activity
from accelplane.pages.hardware_metrics import held_units
from accelplane.pages.holders import HolderReader, Holders
from accelplane.pages.inventory_feed import Generation, InventoryFeed
from accelplane.pages.measurements import Measurements
from accelplane.pages.metrics import Contents, PageOptions
from accelplane.pages.readings import HeldUnits, NodeReadings, Readings

if TYPE_CHECKING:
    from accelplane.pages.clients import ClientUse

_LAG_PAUSE = 0.002


class Observer:
    """Owns the readers of an agent's pages. The owner calls `close` at its end."""

    def __init__(self, agent: Agent) -> None:
        settings = agent.settings
        self._agent = agent
        queue = ThreadQueue()
        self._measurements = Measurements(agent.inventories, settings.root, queue=queue, problems=agent.problems)
        self._holders = HolderReader(settings, agent.allocations, allocated_at=agent.allocated_at)
        self._readings = Readings(
            agent.inventories,
            settings.root,
            held=self._held,
            waking=settings.metrics_waking,
            min_interval=settings.metrics_min_interval,
            queue=queue,
            problems=agent.problems,
        )
        self._held_units: HeldUnits = ()
        self._activity = Activity()
        self._observed: NodeReadings | None = None
        self._inventory = InventoryFeed(
            agent.status,
            agent.changes,
            self._holders,
            self._readings,
            program=agent.program,
            node=os.environ.get("NODE_NAME", ""),
            idle_since=lambda: self._activity.idle_since(time.monotonic()),
        )
        self._holder_labels = settings.metrics_holder_labels
        self._clients = None
        if settings.metrics_clients:
            from accelplane.pages.clients import ClientReader  # noqa: PLC0415 - memory of agents without this option

            self._clients = ClientReader(settings.metrics_clients, settings.sockets_dir)

    async def contents(self) -> Contents:
        """Reads everything, from each source at the same time."""
        holders = await self._holders.read()  # first: a device that a container holds may be read more often
        samples, readings, clients, lag = await asyncio.gather(
            self._measurements.take(), self._take(), self._client_use(holders), _lag()
        )
        if clients is not None and not clients.failed:
            self._activity.update_clients(clients.busy_seconds(readings.plans), self._held(), time.monotonic())
        return Contents(
            samples=samples,
            dropped=dict(self._measurements.dropped),
            readings=readings,
            holders=holders,
            container_use=() if clients is None else clients.families(readings.plans, self._holder_labels),
            requests=dict(self._holders.requests),
            idle=self._activity.idle_seconds(time.monotonic()),
            lag=lag,
            now=time.monotonic(),
        )

    async def readings(self) -> NodeReadings:
        await self._holders.read()
        return await self._take()

    async def _take(self) -> NodeReadings:
        readings = await self._readings.take()
        if readings is not self._observed:
            self._observed = readings
            self._activity.update(readings, self._held_units, time.monotonic())
        return readings

    def _held(self) -> HeldUnits:
        """The units that containers hold, at the beginning of a reading."""
        self._held_units = held_units(self._agent.status(), self._holders.last)
        return self._held_units

    async def inventory(self) -> Generation:
        return await self._inventory.current()

    def last_inventory(self, matches: Callable[[str], bool]) -> Generation | None:
        """The last generation if `matches` is true for its entity tag, without reading anything."""
        return self._inventory.last(matches)

    async def next_inventory(self, known: str, seconds: float) -> Generation | None:
        """A generation other than that with the entity tag `known`; None if there is none within `seconds`."""
        return await self._inventory.next(known, seconds)

    async def close(self) -> None:
        self._inventory.close()
        await asyncio.gather(self._measurements.close(), self._readings.close(), self._holders.close())
        if self._clients is not None:
            await self._clients.close()

    async def _client_use(self, holders: Holders) -> "ClientUse | None":
        return None if self._clients is None else await self._clients.read(holders, self._agent.status())


def page_options(settings: Settings) -> PageOptions:
    """The options of the metrics page. Raises `ConfigurationError`."""
    node = os.environ.get("NODE_NAME", "")
    if settings.metrics_node_label and not node:
        raise ConfigurationError("-metrics-node-label: NODE_NAME is not set, expected the name of this pod's node")
    return PageOptions(
        max_samples=settings.metrics_max_samples,
        holders=settings.metrics_holders,
        holder_labels=settings.metrics_holder_labels,
        node=node if settings.metrics_node_label else "",
    )


async def _lag() -> float:
    """How much later than requested the event loop continues a task."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await asyncio.sleep(_LAG_PAUSE)
    return max(0.0, loop.time() - start - _LAG_PAUSE)
