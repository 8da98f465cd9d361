"""The health loop of one plugin: checks devices at intervals and when requested, new ones before they are listed."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from accelplane.devices import Inventory, Verdict
from accelplane.host import Host
from accelplane.host.blocking import SerialThread
from accelplane.kubelet.notifier import coalesced_deadline
from accelplane.node.context import PluginContext
from accelplane.node.health import HealthTracker
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

_FIRST_CHECK_DEADLINE = 1.0
_ADDRESSES_TIMEOUT = 2.0


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
        # The PCI addresses of the units of an inventory, read when there is an event.
        self._addresses: tuple[Inventory, Mapping[str, str]] | None = None
        self._problem = ""
        # Reads the addresses; the owner waits for it at its end.
        self.thread = SerialThread()

    def request(self) -> None:
        """Requests a check of all devices. A request during a check causes another one."""
        self._requested.set()

    async def run(self) -> None:
        while True:
            await self._wait_for_request()
            self._requested.clear()
            plugin, inventory = self._context.plugin, self._inventory()
            if not len(inventory) or not (self._checks(plugin) or self._context.events.verdicts):
                continue
            reported = await self._reported(inventory)
            states, unknown = dict(self.tracker.states), dict(self.tracker.unknown)
            await self.tracker.check(plugin, Host(self._context.settings.root), inventory, reported=reported)
            if self.tracker.states != states:
                await self._publish()
            elif self.tracker.unknown != unknown:
                self._context.changed()

    async def check_new_devices(self) -> None:
        """Checks the units of the inventory that have no state yet, and forgets removed units."""
        plugin, inventory = self._context.plugin, self._inventory()
        units = {device.unit: device for device in inventory}
        self.tracker.retain(units)
        if not plugin.overrides("health"):
            self.tracker.forget_sources()
            if not self._context.events.verdicts:
                return
        new = [device for unit, device in units.items() if unit not in self.tracker.states]
        if new:
            reported = await self._reported(inventory)
            host = Host(self._context.settings.root)
            await self.tracker.check(plugin, host, new, _FIRST_CHECK_DEADLINE, reported=reported)

    def _checks(self, plugin: Plugin[Config]) -> bool:
        """Whether there is a source of health, or a unit whose health an event has changed."""
        return plugin.overrides("health") or bool(self.tracker.states)

    async def _reported(self, inventory: Inventory) -> Mapping[str, Verdict]:
        """The verdicts that events imply, by unit."""
        plugin = self._context.plugin
        verdicts = dict(self._context.events.verdicts)
        if not verdicts or not plugin.overrides("readings"):
            return {}
        addresses = await self._read_addresses(plugin, inventory)
        return {unit: verdicts[address] for unit, address in addresses.items() if address in verdicts}

    async def _read_addresses(self, plugin: Plugin[Config], inventory: Inventory) -> Mapping[str, str]:
        """The PCI address of each unit: the earlier ones while the files of a device block, maybe of a wedged one."""
        earlier = self._addresses
        if earlier is not None and earlier[0] is inventory:
            return earlier[1]
        root = self._context.settings.root
        try:
            async with asyncio.timeout(_ADDRESSES_TIMEOUT):
                found = await self.thread.run(lambda: _addresses(plugin, Host(root), inventory))
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            problem = str(error) or type(error).__name__
            self._report(f"no answer within {_ADDRESSES_TIMEOUT:g} s" if isinstance(error, TimeoutError) else problem)
            return {} if earlier is None else earlier[1]
        self._report("")
        self._addresses = inventory, found
        return found

    def _report(self, problem: str) -> None:
        """Logs each problem once."""
        if problem and problem != self._problem:
            log.warning("%s: the devices of events are unknown: %s", self._context.name, problem)
        self._problem = problem

    async def _wait_for_request(self) -> None:
        plugin = self._context.plugin
        deadline = None
        if self._checks(plugin):
            interval = math.inf
            if plugin.overrides("health"):
                interval = self._context.settings.health_interval or plugin.health_policy.interval
            seconds = self.tracker.next_check_in(interval)
            if seconds < math.inf:
                deadline = coalesced_deadline(asyncio.get_running_loop().time(), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._requested.wait()


def _addresses(plugin: Plugin[Config], host: Host, inventory: Inventory) -> Mapping[str, str]:
    """The PCI address of each unit."""
    return {unit: plan.bdf for plan in plugin.readings(host, inventory) for unit in plan.units if plan.bdf}
