"""An agent whose DRA driver is a stand-in: tests set the claims and slices."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gadgets import Table
from kubelets import Kubelet
from msgspec.structs import replace
from waiting import until

from accelplane.apiserver import ApiServer, ClientConfig
from accelplane.devices import Unit
from accelplane.dra.model import Offer
from accelplane.dra.ownership import OwnershipRecord
from accelplane.node.agent import Agent
from accelplane.node.dra.driver import NodeAccess
from accelplane.node.dra.family import FamilyUnits
from accelplane.node.settings import Settings
from accelplane.node.status import DraStatus
from accelplane.plugins import Config, Plugin

ACCESS = NodeAccess(api=ApiServer(ClientConfig(server="http://127.0.0.1:9")), node="n")


class StandIn:
    """A driver whose claims and slices a test sets. Slices follow the offers while `writes` is true."""

    def __init__(self, name: str, units: FamilyUnits, *_: Any, **__: Any) -> None:
        self.name = name
        self.claims: Mapping[str, Sequence[str]] = {}
        self.others_unprepare = False
        self.claims_of_others: Collection[str] = ()  # of instances that have ended, not known yet
        self.bound_units: Mapping[str, Unit] = {}
        self.units = units
        self.writes = True
        self.busy = asyncio.Event()
        self.busy.set()
        self._slices: Collection[str] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        self.units.driver = self
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    def prepared(self) -> Mapping[str, Sequence[str]]:
        return self.claims

    def held(self) -> Collection[str]:
        if self.others_unprepare:
            self.claims = {}
        return {*self.claims, *self.claims_of_others}

    def bound(self) -> Mapping[str, Unit]:
        return self.bound_units

    def cleanup(self) -> Mapping[str, str]:
        return {}

    async def idle(self) -> None:
        await self.busy.wait()

    def published(self) -> Collection[str] | None:
        if self.writes:
            self._slices = frozenset(id_ for id_, offer in self.units.units().items() if offer.owner == "dra")
        return self._slices

    def is_current(self, _settings: Settings) -> bool:
        return True

    @property
    def is_unused(self) -> bool:
        return not self.claims and self.published() == frozenset()

    def status(self) -> DraStatus:
        return DraStatus(driver=self.name)


class GpuTable(Table):
    namespace = "gpu.intel.com"


class Node:
    """An agent with the plugin `table`, and its settings."""

    def __init__(self, kubelet: Kubelet, root: Path, plugin: Plugin[Config], api: str) -> None:
        self.kubelet = kubelet
        self.plugin = plugin
        self.config = root / "etc" / "config"
        self.config.parent.mkdir()
        self.config.touch()
        self.settings = Settings(
            root=str(root), kubelet_dir=kubelet.directory, cdi_dir=f"{kubelet.directory}/cdi", dra_api=api
        )
        self.agent: Agent
        self.events: list[str] = []

    def record(self, driver: str, reason: str, text: str) -> None:
        """As `EventWriter`."""
        self.events.append(f"{driver}: {reason}: {text}")

    async def close(self) -> None:
        """As `EventWriter`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.agent = Agent(
            self.settings,
            {"table": self.plugin},
            config_file=str(self.config),
            reload=lambda: (self.settings, {"table": self.plugin}),
            dra=lambda: ACCESS,
        )
        task = asyncio.create_task(self.agent.run())
        try:
            yield
        finally:
            self.agent.stop()
            await task

    def switch(self, api: str) -> None:
        """Changes the configuration of the running agent."""
        self.settings = replace(self.settings, dra_api=api)
        self.config.write_text(api)

    @property
    def units(self) -> FamilyUnits:
        assert self.agent.dra is not None
        return self.agent.dra.families["table"].units

    @property
    def driver(self) -> StandIn:
        driver = self.units.driver
        assert isinstance(driver, StandIn)
        return driver

    def offers(self) -> Mapping[str, Offer]:
        dra = self.agent.dra
        return dra.families["table"].units.units() if dra is not None and "table" in dra.families else {}

    async def owned(self, **owners: str) -> None:
        """Waits until the units have these owners."""
        await until(lambda: {id_: offer.owner for id_, offer in self.offers().items()} == owners)

    def recorded(self) -> frozenset[str]:
        record = OwnershipRecord(self.settings.ownership_dir, "table")
        assert record.open()
        record.close()
        return record.units
