"""What the metrics page needs beside the status: measurements, readings and holders, read when a page is requested."""

import asyncio
import os
import time
from typing import TYPE_CHECKING

from accelplane.node.agent import Agent
from accelplane.node.hardware_metrics import held_units
from accelplane.node.holders import HolderReader, Holders
from accelplane.node.inventory_feed import Generation, InventoryFeed
from accelplane.node.measurements import Measurements
from accelplane.node.metrics import Contents
from accelplane.node.readings import NodeReadings, Readings
from accelplane.node.status import allocations

if TYPE_CHECKING:
    from accelplane.node.clients import ClientUse


class Observer:
    """Owns the readers of an agent's pages. The owner calls `close` at its end."""

    def __init__(self, agent: Agent) -> None:
        settings = agent.settings
        self._agent = agent
        self._measurements = Measurements(agent.inventories, settings.root)
        self._holders = HolderReader(settings, lambda: allocations(agent.status()))
        self._readings = Readings(
            agent.inventories,
            settings.root,
            held=lambda: held_units(agent.status(), self._holders.last),
            waking=settings.metrics_waking,
            min_interval=settings.metrics_min_interval,
        )
        self._inventory = InventoryFeed(
            agent.status,
            agent.changes,
            self._holders,
            self._readings,
            program=agent.program,
            node=os.environ.get("NODE_NAME", ""),
        )
        self._clients = None
        if settings.metrics_clients:
            from accelplane.node.clients import ClientReader  # noqa: PLC0415 - memory of agents without this option

            self._clients = ClientReader(settings.metrics_clients, settings.sockets_dir)

    async def contents(self) -> Contents:
        """Reads everything, from each source at the same time."""
        holders = await self._holders.read()  # first: a device that a container holds may be read more often
        samples, readings, clients = await asyncio.gather(
            self._measurements.take(), self._readings.take(), self._client_use(holders)
        )
        return Contents(
            samples=samples,
            readings=readings,
            holders=holders,
            container_use=() if clients is None else clients.families(readings.plans),
            requests=dict(self._holders.requests),
            now=time.monotonic(),
        )

    async def readings(self) -> NodeReadings:
        """The current values of the devices."""
        await self._holders.read()
        return await self._readings.take()

    async def inventory(self) -> Generation:
        """The inventory now."""
        return await self._inventory.current()

    async def next_inventory(self, known: str, seconds: float) -> Generation | None:
        """A generation other than that with the entity tag `known`; None if there is none within `seconds`."""
        return await self._inventory.next(known, seconds)

    async def close(self) -> None:
        """Ends all reads."""
        await self._inventory.close()
        await asyncio.gather(self._measurements.close(), self._readings.close(), self._holders.close())
        if self._clients is not None:
            await self._clients.close()

    async def _client_use(self, holders: Holders) -> "ClientUse | None":
        return None if self._clients is None else await self._clients.read(holders, self._agent.status())
