"""The health loop of one plugin: checks devices at intervals and when requested, new ones before they are listed.

While all devices are healthy, a thread watches those of plugins that support it. The event loop sleeps meanwhile: to
wake it up and to start a thread for each check takes most of the processor time of an idle agent.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache

from accelplane.devices import Device, Inventory, Verdict
from accelplane.host import Host, HostError, pci_address
from accelplane.host.blocking import SerialThread, ThreadLimitError
from accelplane.host.isolation import HostThread
from accelplane.host.pci import DEVICES
from accelplane.kubelet.notifier import coalesced_deadline
from accelplane.node.context import PluginContext
from accelplane.node.health import HealthTracker
from accelplane.plugins import Config, Plugin

log = logging.getLogger(__name__)

Addresses = Mapping[str, tuple[str, str]]

_FIRST_CHECK_DEADLINE = 1.0
_ADDRESSES_TIMEOUT = 2.0
# Seconds between complete checks of devices that a thread watches: they find out whether its reads hang.
_WATCHED_INTERVAL = 60.0


class HealthLoop:
    """Checks the devices found until `run` is cancelled and calls `publish` when a state has changed."""

    def __init__(self, context: PluginContext, publish: Callable[[], Awaitable[None]]) -> None:
        self.tracker = HealthTracker(context.name, context.problems)
        self._context = context
        self._publish = publish
        self._requested = asyncio.Event()
        # The PCI addresses of the units of an inventory, read when there is an event.
        self._addresses: tuple[Inventory, Addresses] | None = None
        self._problem = ""
        self._host = lru_cache(maxsize=1)(Host)  # resolves the root in the settings once
        self._watch: _Watch | None = None
        self._waits_for_request_only = False  # no check is due: there was nothing to check when the wait began
        self._units: tuple[Inventory, Sequence[Device]] | None = None  # a device of each unit, for the watch
        # The owner waits for the threads at its end: they read addresses, read health, and watch healthy devices.
        self.thread, self._read_thread = HostThread(context.blocked), HostThread(context.blocked)
        self.watch_thread = SerialThread()
        self.threads = self.thread, self._read_thread, self.watch_thread

    def request(self) -> None:
        """Requests a check of all devices. A request during a check causes another one."""
        self._requested.set()

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._stop_watch()

    async def _run(self) -> None:
        while True:
            await self._wait_for_request()
            self._requested.clear()
            plugin, inventory = self._context.plugin, self._context.devices.found
            if not len(inventory) or not (self._checks(plugin) or self._context.events.verdicts):
                continue
            reported = await self._event_verdicts(inventory)
            states = dict(self.tracker.states)
            shown = dict(self.tracker.unknown), dict(self.tracker.warnings)
            await self.tracker.check(plugin, self._fresh_host(), inventory, reported=reported)
            if self.tracker.states != states:
                await self._publish()
            elif (self.tracker.unknown, self.tracker.warnings) != shown:
                self._context.changed()

    async def check_new_devices(self) -> None:
        """Checks the units of the inventory that have no state yet, and forgets removed units."""
        plugin, inventory = self._context.plugin, self._context.devices.found
        units = {device.unit: device for device in inventory}
        self.tracker.retain(units)
        if not plugin.overrides("health"):
            self.tracker.forget_sources()
            if not self._context.events.verdicts:
                return
        new = [device for unit, device in units.items() if unit not in self.tracker.states]
        if new:
            reported = await self._event_verdicts(inventory)
            await self.tracker.check(plugin, self._fresh_host(), new, _FIRST_CHECK_DEADLINE, reported=reported)
            if self._watch is not None and not self.tracker.all_healthy:
                self.request()  # the watch is for healthy devices only
        if self._waits_for_request_only and self._next_check_in(plugin) < math.inf:
            self.request()  # a scan has found the first source of health, or the first unit to check

    def _fresh_host(self) -> Host:
        host = self._host(self._context.settings.root).fresh()
        host.blocked, host.thread = self._context.blocked.by_device, self._read_thread
        return host

    def _checks(self, plugin: Plugin[Config]) -> bool:
        """Whether there is a source of health, or a unit whose health an event has changed."""
        return plugin.overrides("health") or bool(self.tracker.states)

    async def _event_verdicts(self, inventory: Inventory) -> Mapping[str, Verdict]:
        """The verdicts that events imply, by unit."""
        verdicts = dict(self._context.events.verdicts)
        if not verdicts:
            return {}
        addresses = await self._read_addresses(inventory)
        return {
            unit: verdicts[address]
            for unit, functions in addresses.items()
            if (address := next((each for each in functions if each in verdicts), ""))
        }

    async def _read_addresses(self, inventory: Inventory) -> Addresses:
        """The PCI addresses of each unit: the earlier ones while the files of a device block, maybe of a wedged one."""
        earlier = self._addresses
        if earlier is not None and earlier[0] is inventory:
            return earlier[1]
        root = self._context.settings.root
        try:
            async with asyncio.timeout(_ADDRESSES_TIMEOUT):
                host = Host(root)
                found, _host = await self.thread.run(host, lambda host: _addresses(host, inventory))
        except (TimeoutError, HostError, ThreadLimitError) as error:
            problem = str(error) or type(error).__name__
            self._report(f"no answer within {_ADDRESSES_TIMEOUT:g} s" if isinstance(error, TimeoutError) else problem)
            return {} if earlier is None else earlier[1]
        self._report("")
        self._addresses = inventory, found
        return found

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.warning(
                "%s: cannot read the PCI addresses of devices for kernel events: %s", self._context.name, problem
            )
        self._problem = problem

    async def _wait_for_request(self) -> None:
        plugin = self._context.plugin
        timer = None
        if self._checks(plugin):
            self._update_watch(plugin, self._interval(plugin))
            seconds = self._next_check_in(plugin)
            if seconds < math.inf:
                # A timer that sets the event costs less than a timeout, which raises an exception at each interval.
                loop = asyncio.get_running_loop()
                timer = loop.call_at(coalesced_deadline(loop.time(), seconds), self._requested.set)
        self._waits_for_request_only = timer is None
        try:
            await self._requested.wait()
        finally:
            self._waits_for_request_only = False
            if timer is not None:
                timer.cancel()

    def _interval(self, plugin: Plugin[Config]) -> float:
        if not plugin.overrides("health"):
            return math.inf
        return self._context.settings.health_interval or plugin.health_policy.interval

    def _next_check_in(self, plugin: Plugin[Config]) -> float:
        """Seconds until the next check without a request, infinite if none is due."""
        if not self._checks(plugin):
            return math.inf
        return self.tracker.next_check_in(self._interval(plugin) if self._watch is None else _WATCHED_INTERVAL)

    def _update_watch(self, plugin: Plugin[Config], interval: float) -> None:
        """Starts a watch while all devices are healthy and the plugin supports it, and stops one that is obsolete."""
        supported = plugin.overrides("health") and plugin.overrides("all_healthy") and interval < _WATCHED_INTERVAL
        needed = supported and self.tracker.all_healthy
        if self._watch is not None and not (needed and self._watch.serves(plugin, interval)):
            self._stop_watch()
        # A thread that hangs is not replaced.
        if needed and self._watch is None and not self.watch_thread.busy:
            watch = _Watch(plugin, interval, lambda: self._is_healthy(plugin))
            try:
                ended = self.watch_thread.start(watch.run)
            except ThreadLimitError:
                return  # the event loop checks the devices until a thread can be started
            self._watch = watch
            ended.add_done_callback(lambda _ended: self.request() if watch is self._watch else None)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _is_healthy(self, plugin: Plugin[Config]) -> bool:
        """Runs in the thread of the watch."""
        inventory = self._context.devices.found
        if self._units is None or self._units[0] is not inventory:
            self._units = inventory, tuple({device.unit: device for device in inventory}.values())
        try:
            return plugin.all_healthy(self._fresh_host(), self._units[1])
        except Exception:  # noqa: BLE001 - a plugin's own hook may raise anything; the check has the same error
            return False


class _Watch:
    """Checks devices in a thread until one may not be healthy, or until stopped."""

    def __init__(self, plugin: Plugin[Config], interval: float, is_healthy: Callable[[], bool]) -> None:
        self._plugin = plugin
        self._interval = interval
        self._is_healthy = is_healthy
        self._stopped = threading.Lock()  # released by `stop`
        self._stopped.acquire()
        self._ended = False  # because a device may not be healthy

    def serves(self, plugin: Plugin[Config], interval: float) -> bool:
        """Whether it continues to check the plugin at this interval."""
        return not self._ended and self._plugin is plugin and self._interval == interval

    def run(self) -> None:
        """What the thread runs."""
        while not self._stopped.acquire(timeout=self._interval):
            if not self._is_healthy():
                self._ended = True
                return

    def stop(self) -> None:
        """Ends the thread after its present check. Call it once."""
        self._stopped.release()


def _addresses(host: Host, inventory: Inventory) -> Addresses:
    """For each unit the PCI address of its function, then that of the physical function if it is a virtual one."""
    from accelplane.node.units import function_address  # noqa: PLC0415 - memory of agents without such events

    found: dict[str, str] = {}
    for device in inventory:
        if device.unit not in found:
            named = next(filter(pci_address, (device.text("bdf"), device.unit, device.id)), "")
            found[device.unit] = named or function_address(host, device)
    return {unit: (address, _physical_function(host, address)) for unit, address in found.items() if address}


def _physical_function(host: Host, address: str) -> str:
    """The address of the physical function of a virtual one; that of a physical function itself."""
    link = f"{DEVICES}/{address}/physfn"
    try:
        return host.resolve(link).rpartition("/")[2] if host.exists(link) else address
    except HostError:
        return address
