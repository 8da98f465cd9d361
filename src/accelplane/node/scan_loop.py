"""The scan loop of one plugin.

A scan runs in a thread. It is repeated after every event that may change its result, after a failure with exponential
backoff, and at least every `safety_interval`. The first events are handled immediately; a continuous stream of events
gets a fifth of one core at most, because scans consume a budget that refills at that rate.
"""

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace

from accelplane.devices import Device, Inventory, Skipped, natural
from accelplane.host import Host, HostError
from accelplane.host.blocking import ThreadLimitError, retrieve_exception
from accelplane.host.isolation import HostThread
from accelplane.host.operations import BlockedError
from accelplane.node.blocked_devices import keep_blocked
from accelplane.node.context import PluginContext
from accelplane.node.hook_results import checked_devices, iterable
from accelplane.node.status import ScanStatus
from accelplane.node.watcher import Watcher
from accelplane.plugins import Config, Plugin, ScanError

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 1.0, 30.0
_DEBOUNCE, _MAX_DEBOUNCE = 0.005, 0.02
_CPU_SHARE, _MAX_BUDGET, _MAX_CHARGE = 0.2, 0.25, 1.0
_MAX_TURN = 0.05
_REFRESH_DEADLINE = 5.0
_SCAN_TIMEOUT = 10.0
_MAX_RESCANS = 3
_MAX_SHOWN = 16  # units in a message
_OTHER_ROOT = "/proc/1/root/"  # real directories of another mount namespace


class ScanLoop:
    """Scans until `run` is cancelled and calls `publish` after each scan, also after a failed one.

    `plugin` is the one that made the last scan that succeeded.

    The scans of all plugins take `turn`s: in parallel they would contend for the interpreter lock at every system call
    and take twice the time. A scan that blocks on a device gives its turn away.
    """

    def __init__(
        self,
        context: PluginContext,
        watcher: Watcher,
        thread: HostThread,
        turn: asyncio.Lock,
        *,
        changed: Callable[[], None],
        publish: Callable[[], Awaitable[float]],
    ) -> None:
        """`changed` is called for every event that may change the result of a scan; it should call `request`.

        `publish` returns the seconds of work that it took.
        """
        self.plugin: Plugin[Config] | None = None
        self.completed = asyncio.Event()
        self.count = 0
        self.failures = 0
        self.seconds = 0.0
        self.problem = ""
        self._context = context
        self._watcher = watcher
        self._thread = thread
        self._turn = turn
        self._changed = changed
        self._publish = publish
        self._requested = asyncio.Event()
        self._failing_since: float | None = None
        self._retry = FIRST_RETRY
        self._directories: frozenset[str] = frozenset()
        self._subsystems: Collection[str] | None = frozenset()
        self._rescans = 0
        self._skipped: frozenset[Skipped] = frozenset()
        self._notes: frozenset[str] = frozenset()

    @property
    def status(self) -> ScanStatus:
        return ScanStatus(
            completed=self.completed.is_set(),
            failing=self.failing,
            problem=self.problem,
            count=self.count,
            failures=self.failures,
            seconds=self.seconds,
        )

    @property
    def failing(self) -> bool:
        return self._failing_since is not None

    @property
    def outdated(self) -> bool:
        """Whether scans have failed for longer than the grace period, so that its devices are no longer valid."""
        since = self._failing_since
        return since is not None and time.monotonic() - since >= self._context.settings.scan_grace

    def request(self) -> None:
        """Requests a scan. A request during a scan causes another one."""
        self._requested.set()

    async def run(self) -> None:
        budget, last = _MAX_BUDGET, time.monotonic()
        while True:
            self._requested.clear()
            start = time.monotonic()
            budget = min(budget + _CPU_SHARE * (start - last), _MAX_BUDGET)
            # A longer scan waits for a device, which costs no processor time.
            budget -= min(await self._scan_and_publish(), _MAX_CHARGE)
            last = time.monotonic()
            if not self.completed.is_set():
                self.completed.set()
                self._context.changed()
            await self._wait_for_request()
            if budget < 0:
                await asyncio.sleep(-budget / _CPU_SHARE)

    async def _wait_for_request(self) -> None:
        """Returns when a scan is due: at the end of a burst of requests, or when the timer expires."""
        settings = self._context.settings
        interval = settings.safety_interval if self._watcher.complete else settings.unwatched_interval
        try:
            async with asyncio.timeout(min(interval, self._retry) if self.failing else interval):
                await self._requested.wait()
        except TimeoutError:
            return
        deadline = time.monotonic() + _MAX_DEBOUNCE
        while self._requested.is_set() and time.monotonic() < deadline:
            self._requested.clear()
            await asyncio.sleep(_DEBOUNCE)

    async def _scan_and_publish(self) -> float:
        """Returns the seconds of work, without the wait for services."""
        plugin, host = self._context.plugin, Host(self._context.settings.root)
        start = time.monotonic()
        try:
            try:
                await self._refresh(plugin, host)
            finally:
                start = time.monotonic()
            inventory, host = await self._scan(plugin, host)
        except Exception as error:  # noqa: BLE001 - a plugin's own scan may raise anything
            self._record_failure(error)
            self._watch(host, complete=False)
        else:
            self.plugin = plugin
            self._record_success(inventory, host)
            self._watch(host, complete=not host.missed)
            self.seconds = time.monotonic() - start
        work = time.monotonic() - start
        return work + await self._publish()

    async def _refresh(self, plugin: Plugin[Config], host: Host) -> None:
        if not plugin.overrides("refresh"):
            return
        try:
            async with asyncio.timeout(_REFRESH_DEADLINE):
                await self._context.call("refresh", lambda: plugin.refresh(host))
        except TimeoutError:
            raise ScanError(f"a service that the scan needs did not answer within {_REFRESH_DEADLINE:g} s") from None

    async def _scan(self, plugin: Plugin[Config], host: Host) -> tuple[Inventory, Host]:
        scan: asyncio.Task[tuple[Inventory, Host]] | None = None
        before, problem = self._context.devices.found, self._context.blocked.problem

        def work(host: Host) -> Inventory:
            return keep_blocked(host, _inventory(plugin, host, _until_blocked(plugin, host)), before, problem)

        try:
            async with self._turn:
                scan = asyncio.create_task(self._thread.run(host, work))
                scan.add_done_callback(retrieve_exception)
                self.count += 1
                await asyncio.wait((scan,), timeout=_MAX_TURN)
            while True:
                done, _pending = await asyncio.wait((scan,), timeout=_SCAN_TIMEOUT)
                if done:
                    return scan.result()
                self._record_failure(
                    ScanError(f"a device does not answer, the scan has taken more than {_SCAN_TIMEOUT:g} s")
                )
                await self._publish()
        finally:
            if scan is not None:
                scan.cancel()

    def _record_success(self, inventory: Inventory, host: Host) -> None:
        name, devices = self._context.name, self._context.devices
        if self.failing:
            log.info("%s: scan succeeded again", name)
        self._failing_since = None
        self._retry = FIRST_RETRY
        self.problem = ""
        before, after = ({device.unit for device in each} for each in (devices.found, inventory))
        for change, units in (("found", after - before), ("no longer found", before - after)):
            if units:
                shown = sorted(units, key=natural)
                more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
                log.info("%s: %s: %s%s", name, change, ", ".join(shown[:_MAX_SHOWN]), more)
        devices.found = inventory
        skipped, notes = frozenset(inventory.skipped), frozenset(host.notes)
        for skip in sorted(skipped - self._skipped, key=lambda skip: skip.subject):
            level = logging.WARNING if skip.warning else logging.INFO
            log.log(level, "%s: %s not published: %s", name, skip.subject, skip.reason)
        for note in sorted(notes - self._notes):
            log.warning("%s: %s", name, note)
        self._skipped, self._notes = skipped, notes

    def _record_failure(self, error: Exception) -> None:
        self.failures += 1
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        else:
            self._retry = min(2 * self._retry, LAST_RETRY)
        expected = isinstance(error, (HostError, ScanError, OSError, ThreadLimitError))
        problem = str(error) or type(error).__name__
        if problem != self.problem:
            self.problem = problem
            log.error(
                "%s: scan failed: %s; the devices found last stay advertised for %g s",
                self._context.name,
                problem if expected else f"{type(error).__name__}: {problem}",
                self._context.settings.scan_grace,
                exc_info=None if expected else error,
            )

    def _watch(self, host: Host, *, complete: bool) -> None:
        """Watches the directories that the scan has read; after a failed scan also those of the scan before it.

        A change between the read and the start of the watch causes no event. So if anything new is watched, one more
        scan follows.
        """
        plugin, root = self._context.plugin, self._context.settings.root
        read = frozenset(host.directories_read).union(plugin.watch.directories)
        directories = read if complete else read | self._directories
        subsystems = plugin.watch.subsystems or _subsystems(directories)
        own_tree = root != "/"
        prefix = host.root.rstrip("/")
        # The kernel reports changes in sysfs by uevents only. A tree of plain files has none.
        paths = [
            f"{prefix}{path}" if path in host.directories_read else _existing_parent(host, path)
            for path in directories
            if own_tree or path.startswith(_OTHER_ROOT) or not path.startswith(("/sys/", "/proc/"))
        ]
        name = self._context.name
        self._watcher.directories(name, paths, self._changed, written=own_tree, root=root if own_tree else "")
        self._watcher.uevents(name, subsystems, self._changed)
        known = self._subsystems
        covered = known is None or (subsystems is not None and set(subsystems) <= set(known))
        if covered and directories <= self._directories:
            self._rescans = 0
        elif self._rescans < _MAX_RESCANS:  # a scan may read other directories each time
            self._rescans += 1
            self.request()
        self._directories, self._subsystems = directories, subsystems


def _until_blocked(plugin: Plugin[Config], host: Host) -> Iterable[object]:
    """One scan with `Plugin.prepare`, which ends at a file of a blocked device if the plugin does not handle it."""
    try:
        if plugin.overrides("prepare"):
            plugin.prepare(host)
        yield from iterable(plugin.scan(host), "devices")
    except BlockedError:
        host.interrupted = True


def scan(plugin: Plugin[Config], host: Host) -> Inventory:
    """One scan; topology left to the framework is filled in. Raises the exceptions of `Plugin.scan`."""
    return _inventory(plugin, host, plugin.scan(host))


def _inventory(plugin: Plugin[Config], host: Host, found: Iterable[object]) -> Inventory:
    inventory = Inventory.of(checked_devices(plugin.namespace, found))
    unset = [device for device in inventory if isinstance(device.topology, UnsetType)]
    return inventory.with_devices(_with_topology(host, unset)) if unset else inventory


async def scan_once(plugin: Plugin[Config], root: str) -> Inventory:
    """One scan outside an agent, without `Plugin.prepare`. Raises the exceptions of the plugin."""
    host = Host(root)
    if plugin.overrides("refresh"):
        await plugin.refresh(host)
    return scan(plugin, host)


async def try_scan(plugin: Plugin[Config], root: str) -> tuple[Inventory, str]:
    """As `scan_once`, with why it failed instead of an exception, empty if it did not."""
    try:
        return await scan_once(plugin, root), ""
    except Exception as error:  # noqa: BLE001 - a plugin's own scan may raise anything
        return Inventory(), error_text(error)


def error_text(error: Exception) -> str:
    """The message of an error of a scan, with the type of an error that a scan is not expected to raise."""
    if isinstance(error, (HostError, ScanError, OSError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def explanation(plugin: Plugin[Config], host: Host) -> bytes:
    """`Plugin.explain` as JSON. Raises the exceptions of the plugin, and errors for values that JSON cannot hold."""
    return msgspec.json.encode(dict(plugin.explain(host)))


def _with_topology(host: Host, devices: Iterable[Device]) -> Iterable[Device]:
    topology = functools.cache(host.topology_of_nodes)
    for device in devices:
        yield replace(device, topology=topology(tuple(node.host_path for node in device.nodes)))


def _existing_parent(host: Host, directory: str) -> str:
    """Where to watch for `directory`: its local path, or that of a parent if symbolic links loop."""
    while True:
        try:
            return host.local(directory)
        except HostError:
            directory = os.path.dirname(directory)


def _subsystems(directories: Collection[str]) -> frozenset[str] | None:
    """Subsystems whose uevents may change what a scan read: those named by class and bus directories.

    None means all: the scan read sysfs elsewhere. A scan that did not read sysfs needs none.
    """
    named: set[str] = set()
    read_sysfs = False
    for path in directories:
        parts = path.split("/")
        if parts[1] != "sys":
            continue
        read_sysfs = True
        if len(parts) > 3 and parts[2] in ("class", "bus"):
            named.add(parts[3])
    return frozenset(named) if named or not read_sysfs else None
