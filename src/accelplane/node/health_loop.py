"""The health loop of one plugin: checks devices at intervals and when requested, new ones before they are listed."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.kubelet.notifier import coalesced_deadline
from accelplane.node.context import PluginContext
from accelplane.node.health import HealthTracker

_FIRST_CHECK_DEADLINE = 1.0


class HealthLoop:
    """Checks the devices of `inventory()` until `run` is cancelled and calls `publish` when a state has changed."""

    def __init__(
        self, context: PluginContext, inventory: Callable[[], Inventory], publish: Callable[[], Awaitable[None]]
    ) -> None:
        self.tracker = HealthTracker(context.name)
        self._context = context
        self._inventory = inventory
        self._publish = publish
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Requests a check of all devices. A request during a check causes another one."""
        self._requested.set()

    async def run(self) -> None:
        while True:
            await self._wait_for_request()
            self._requested.clear()
            plugin, inventory = self._context.plugin, self._inventory()
            if not plugin.overrides("health") or not len(inventory):
                continue
            states, unknown = dict(self.tracker.states), dict(self.tracker.unknown)
            await self.tracker.check(plugin, Host(self._context.settings.root), inventory)
            if self.tracker.states != states:
                await self._publish()
            elif self.tracker.unknown != unknown:
                self._context.changed()

    async def check_new_devices(self) -> None:
        """Checks the units of the inventory that have no state yet, and forgets units that are gone."""
        plugin = self._context.plugin
        if not plugin.overrides("health"):
            self.tracker.retain(())
            return
        units = {device.unit: device for device in self._inventory()}
        self.tracker.retain(units)
        new = [device for unit, device in units.items() if unit not in self.tracker.states]
        if new:
            await self.tracker.check(plugin, Host(self._context.settings.root), new, _FIRST_CHECK_DEADLINE)

    async def _wait_for_request(self) -> None:
        plugin = self._context.plugin
        deadline = None
        if plugin.overrides("health"):
            interval = self._context.settings.health_interval or plugin.health_policy.interval
            now = asyncio.get_running_loop().time()
            deadline = coalesced_deadline(now, self.tracker.next_check_in(interval))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._requested.wait()
