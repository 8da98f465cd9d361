"""Reads the files of all devices for the metrics pages, when a page is requested and at no other time.

A read of a driver's file may block. The devices of all plugins are read in one thread; if a read takes long, another
thread continues with the next plugin. A device whose read takes longer than a second is abandoned together with the
thread, and other threads continue with the further devices.

The directories of the files stay open until the next scan, or until nobody has read for two minutes: opening them takes
a sixth of the time of a reading. An open directory neither wakes a device nor delays its removal.
"""

import asyncio
import logging
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.host.blocking import ThreadLimitError, ThreadQueue, retrieve_exception, start_thread
from accelplane.node.hook_problems import ProblemsOf, problems_by_plugin
from accelplane.node.hook_results import checked_plans
from accelplane.node.units import complete
from accelplane.pages.device_reader import DeviceReader, DeviceReading
from accelplane.pages.measurements import Sources
from accelplane.plugins import Config, Plugin
from accelplane.readings.plan import DevicePlan

log = logging.getLogger(__name__)

_READ_TIMEOUT = 1.0
_PLAN_TIMEOUT = 4.0
_CLOSE_TIMEOUT = 0.5
# Seconds until a device whose read has blocked is read again, by the number of times in a row.
_STUCK_PAUSES = (60.0, 120.0, 240.0, 480.0, 600.0)
# Open directories of a plugin, and as a share of the limit of descriptors. 64 GPUs have 320.
_MAX_OPEN_DIRECTORIES = 1024
_DESCRIPTOR_SHARE = 16
_OPEN_SECONDS = 120.0
_MAX_CONCURRENT = 16  # reads of a plugin that may block at the same time

HeldUnits = Collection[tuple[str, str]]  # plugin, unit


class NodeReadings(Struct, frozen=True):
    """The readings of all devices, and the reads of each plugin by outcome since the agent started."""

    devices: Sequence[DeviceReading] = ()
    outcomes: Mapping[str, Mapping[str, int]] = {}
    plans: Mapping[str, Sequence[DevicePlan]] = {}


class _Planning(NamedTuple):
    """A thread that makes a plan for the devices of a scan, and until when pages wait for it."""

    plugin: Plugin[Config]
    inventory: Inventory
    result: "asyncio.Future[tuple[Sequence[DevicePlan], Sequence[str]]]"
    until: float


class _Device(Struct, eq=False):
    """A device with the state of blocking reads.

    `planned` is the reader of a newer plan, for the next reading. `blocked`: a thread is in a read now, and was
    abandoned.
    """

    reader: DeviceReader
    planned: DeviceReader | None = None
    blocked: bool = False
    times_stuck: int = 0
    stuck_until: float = float("-inf")

    @property
    def plan(self) -> DevicePlan:
        return (self.planned or self.reader).plan

    def use_plan(self) -> None:
        """Reads by the newest plan from now on. Call it only while no reading of the device is awaited."""
        if self.planned is not None and not self.blocked:
            self.planned.adopt(self.reader)
            self.reader, self.planned = self.planned, None


class _Plugin(Struct, eq=False):
    """A plugin with its plan. `host` keeps directories open from one reading to the next."""

    plugin: Plugin[Config]
    inventory: Inventory
    host: Host
    devices: list[_Device] = []


class Readings:
    """Reads the devices of `sources()`: plugins by name, with the devices of their last scan.

    `held` returns the units that containers hold now. A reading younger than `min_interval` seconds is used again.
    """

    def __init__(
        self,
        sources: Callable[[], Sources],
        root: str,
        *,
        held: Callable[[], HeldUnits],
        waking: str = "auto",
        min_interval: float = 1.0,
        read_timeout: float = _READ_TIMEOUT,
        open_seconds: float = _OPEN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        queue: ThreadQueue | None = None,
        problems: ProblemsOf | None = None,
    ) -> None:
        """`queue` has the threads that read; others may use it too. Directories close `open_seconds` after a read."""
        self._sources = sources
        self._queue = queue or ThreadQueue()
        self._root = root
        self._problems = problems or problems_by_plugin()
        self._held = held
        self._waking: str = waking
        self._min_interval = min_interval
        self._read_timeout = read_timeout
        self._clock = clock
        self._plugins: dict[str, _Plugin] = {}
        self._outcomes: dict[str, Counter[str]] = {}
        self._denied: set[str] = set()
        self._planning: dict[str, _Planning] = {}
        self._plan_locks: dict[str, asyncio.Lock] = {}
        self._running: asyncio.Task[NodeReadings] | None = None
        self._last: tuple[float, NodeReadings] = (float("-inf"), NodeReadings())
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open_directories = min(_MAX_OPEN_DIRECTORIES, descriptors // _DESCRIPTOR_SHARE)
        self._open_seconds = open_seconds
        self._close_timer: asyncio.TimerHandle | None = None

    async def take(self) -> NodeReadings:
        """The readings of all devices. Calls at the same time share one reading."""
        if self._clock() - self._last[0] < self._min_interval:
            return self._last[1]
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._read_all())
        # A caller that is cancelled does not end the reading of the others.
        return await asyncio.shield(self._running)

    async def plans(self) -> Mapping[str, Sequence[DevicePlan]]:
        """The plans of all plugins, without reading a device. Made again if the devices have changed."""
        sources = self._sources()
        named = [(name, *each) for name, each in sources.items() if each[0].overrides("readings")]
        known = await asyncio.gather(*(self._planned(*each, exact=False) for each in named))
        return {name: _plans(each) for (name, *_), each in zip(named, known, strict=True)}

    @property
    def blocked(self) -> Sequence[str]:
        """The devices that a thread is reading now after its reader has stopped waiting."""
        return [each.reader.plan.device for known in self._plugins.values() for each in known.devices if each.blocked]

    async def close(self) -> None:
        """Ends the current reading. Threads that block in the kernel end with the process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,), timeout=_CLOSE_TIMEOUT)
        for planning in self._planning.values():
            planning.result.cancel()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._plugins.clear()

    async def _read_all(self) -> NodeReadings:
        sources = self._sources()
        for name in self._plugins.keys() - sources.keys():
            del self._plugins[name]
        held: dict[str, set[str]] = {}
        for name, unit in self._held():
            held.setdefault(name, set()).add(unit)
        reads = [
            self._read_plugin(name, *each, held.get(name, ()))
            for name, each in sources.items()
            if each[0].overrides("readings")
        ]
        devices = [reading for part in await asyncio.gather(*reads) for reading in part]
        readings = NodeReadings(
            devices,
            {name: dict(counts) for name, counts in self._outcomes.items()},
            {name: _plans(known) for name, known in self._plugins.items()},
        )
        self._last = self._clock(), readings
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._close_timer = asyncio.get_running_loop().call_later(self._open_seconds, self._close_directories)
        return readings

    def _close_directories(self) -> None:
        for known in self._plugins.values():
            known.host.close_directories()

    async def _read_plugin(
        self, name: str, plugin: Plugin[Config], inventory: Inventory, held: Collection[str]
    ) -> list[DeviceReading]:
        known = await self._planned(name, plugin, inventory, exact=True)
        for device in known.devices:
            device.use_plan()
        now = self._clock()
        waiting = [device for device in known.devices if device.blocked or device.stuck_until > now]
        found = {id(device): device.reader.stuck() for device in waiting}
        due = deque(device for device in known.devices if id(device) not in found)
        works = [_Work(due, known.host, self._waking, now, held)] if due else []
        problem = ""
        while works:
            for work, stuck in zip(works, await asyncio.gather(*map(self._follow, works)), strict=True):
                found.update(work.results)
                problem = problem or work.problem
                if stuck is not None:
                    found[id(stuck)] = stuck.reader.stuck()
                    self._record_stuck(name, stuck)
                    if work.host is known.host:
                        known.host = known.host.fresh()
            # After a read that has blocked, others may block too: they are waited for at the same time.
            works = [
                _Work(due, known.host.fresh(), self._waking, now, held) for _ in range(min(len(due), _MAX_CONCURRENT))
            ]
        self._problems(name).update("readings of devices", [problem] if problem else [])
        readings = [found[id(device)] for device in known.devices if id(device) in found]
        self._count(name, readings)
        return readings

    async def _planned(self, name: str, plugin: Plugin[Config], inventory: Inventory, *, exact: bool) -> _Plugin:
        """The plugin with its plan: `exact` if it must be of this scan, and not of an earlier one with equal result."""
        async with self._plan_locks.setdefault(name, asyncio.Lock()):
            known = self._plugins.get(name)
            if known is None or known.plugin is not plugin:
                return await self._plan(name, plugin, inventory)
            if known.inventory is inventory or (not exact and known.inventory == inventory):
                return known
            return await self._plan(name, plugin, inventory)

    async def _plan(self, name: str, plugin: Plugin[Config], inventory: Inventory) -> _Plugin:
        """The plugin with the devices of a new plan. Without one, as long as planning blocks, it has no devices."""
        known = self._plugins.get(name)
        earlier = {device.reader.plan.device: device for device in known.devices} if known else {}
        made = _Plugin(plugin, inventory, Host(self._root, open_directories=self._open_directories))
        loop = asyncio.get_running_loop()
        while True:
            planning = self._planning.get(name)
            if planning is None:
                try:
                    planning = self._planning[name] = self._start_planning(plugin, inventory)
                except ThreadLimitError as error:
                    self._problems(name).update("readings", [str(error)])
                    return made
            # Only the first pages wait for a directory that blocks. The client of the very first one may disconnect.
            await asyncio.wait((planning.result,), timeout=max(0.0, planning.until - loop.time()))
            if not planning.result.done():
                self._problems(name).update("readings", [f"no plan within {_PLAN_TIMEOUT:g} s"])
                return made
            del self._planning[name]
            if planning.plugin is plugin and planning.inventory is inventory:
                break
            # The plan is for the devices of an earlier scan.
            retrieve_exception(planning.result)
        plans: Sequence[DevicePlan] = []
        try:
            plans, problems = planning.result.result()
        except Exception as error:  # noqa: BLE001 - a plugin's hook may raise anything
            problems = [f"{type(error).__name__}: {error}"]
        self._problems(name).update("readings", problems)
        for plan in plans:
            reader = DeviceReader(name, plan)
            device = earlier.get(plan.device)
            if device is None:
                device = _Device(reader)
            else:
                # A thread may be reading the device now.
                device.planned = reader
            made.devices.append(device)
        self._plugins[name] = made
        return made

    def _start_planning(self, plugin: Plugin[Config], inventory: Inventory) -> _Planning:
        host = Host(self._root)

        def work() -> tuple[Sequence[DevicePlan], Sequence[str]]:
            plans, problems = checked_plans(plugin.readings(host, inventory))
            return list(complete(host, plans, inventory)), problems

        thread = start_thread(work)
        return _Planning(plugin, inventory, thread, asyncio.get_running_loop().time() + _PLAN_TIMEOUT)

    async def _follow(self, work: "_Work") -> _Device | None:
        """Waits for a thread that reads devices. Returns the device whose read blocks, if there is one."""
        running = self._queue.submit(work.run)
        while not running.done():
            await asyncio.wait((running,), timeout=work.time_limit(self._read_timeout))
            if not running.done() and (stuck := work.abandon(self._read_timeout)) is not None:
                work.host.close_directories()  # the thread may keep them for ever
                return stuck
        running.result()
        return None

    def _record_stuck(self, name: str, device: _Device) -> None:
        pause = _STUCK_PAUSES[min(device.times_stuck, len(_STUCK_PAUSES) - 1)]
        device.times_stuck += 1
        device.stuck_until = self._clock() + pause
        log.warning(
            "%s: %s: a read takes longer than %g s; the device is not read for %g s",
            name, device.reader.plan.device, self._read_timeout, pause,
        )  # fmt: skip

    def _count(self, name: str, readings: Iterable[DeviceReading]) -> None:
        counts = self._outcomes.setdefault(name, Counter())
        for reading in readings:
            for outcome, count in reading.outcomes.items():
                counts[outcome] += count
            for path in reading.denied:
                if path not in self._denied:
                    self._denied.add(path)
                    log.info("%s: %s: permission denied; its metrics are missing", name, path)


def _plans(known: _Plugin) -> Sequence[DevicePlan]:
    return [device.plan for device in known.devices]


class _Work:
    """Reads devices of a queue in one thread, until the queue is empty or the thread is abandoned.

    Several threads may read devices of one queue, each with a host of its own.
    """

    def __init__(self, due: "deque[_Device]", host: Host, waking: str, now: float, held: Collection[str]) -> None:
        self.results: dict[int, DeviceReading] = {}
        self.problem = ""
        self.host = host
        self._due = due
        self._waking: str = waking
        self._now = now
        self._held = held
        self._lock = threading.Lock()
        self._current: tuple[_Device, float] | None = None  # with the monotonic time at which its read began
        self._abandoned = False

    def run(self) -> None:
        """What the thread runs."""
        while (device := self._next()) is not None:
            reading, problem = self._read(device)
            with self._lock:
                self._current = None
                device.blocked = False
                if not self._abandoned:
                    device.times_stuck = 0
                    self.problem = problem or self.problem
                    if reading is not None:
                        self.results[id(device)] = reading

    def _next(self) -> _Device | None:
        with self._lock:
            if self._abandoned:
                return None
            try:
                device = self._due.popleft()
            except IndexError:
                return None
            self._current = device, time.monotonic()
            return device

    def time_limit(self, timeout: float) -> float:
        """Seconds until the current read has taken `timeout`."""
        current = self._current
        return timeout if current is None else max(0.0, current[1] + timeout - time.monotonic())

    def abandon(self, timeout: float) -> _Device | None:
        """Abandons the thread if its current read takes `timeout` or longer; returns the device of this read."""
        with self._lock:
            if self._current is None or time.monotonic() - self._current[1] < timeout:
                return None
            self._abandoned = True
            device = self._current[0]
            device.blocked = True
            return device

    def _read(self, device: _Device) -> tuple[DeviceReading | None, str]:
        held = any(unit in self._held for unit in device.reader.plan.units)
        try:
            return device.reader.read(self.host, self._waking, self._now, held=held), ""
        except Exception as error:  # noqa: BLE001 - parsers of other plugins may raise anything
            return None, f"{device.reader.plan.device}: {type(error).__name__}: {error}"
