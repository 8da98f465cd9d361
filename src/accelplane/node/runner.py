"""One plugin at work: it looks when something may have changed, and what it found is published.

Looking is a scan in a thread of its own. A burst of events is answered at once; in a storm, however long it lasts,
looking takes a fifth of one core at most, for it draws on a credit that refills at that rate. A scan that fails keeps
what was found last; after the grace period its devices are advertised as unhealthy rather than taken away. A device
that vanished is unhealthy for a moment before it leaves the list, for the kubelet shows an id that is simply gone as a
healthy one; a plugin may have its devices linger like that.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Changes, Device, Inventory, Skipped
from accelplane.host import Host, HostError
from accelplane.host.blocking import in_thread
from accelplane.kubelet import podresources, sockets
from accelplane.kubelet.pulse import Pulse
from accelplane.logs import v
from accelplane.node.cdi import CdiDirectory
from accelplane.node.health import HealthTracker
from accelplane.node.nfd import LabelFile
from accelplane.node.publish import Publisher
from accelplane.node.settings import Settings
from accelplane.node.watch import Watcher
from accelplane.plugins import Plugin, ScanError
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

_SETTLE, _SETTLE_AT_MOST = 0.005, 0.02
_SHARE_OF_TIME, _MOST_CREDIT, _MOST_CHARGE = 0.2, 0.25, 1.0
_LONGEST_TURN = 0.05
_REFRESH_DEADLINE = 5.0
_SCAN_PATIENCE = 10.0
_FIRST_VERDICT_DEADLINE = 1.0
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0


class PluginRunner:
    """Runs `plugin` until its `run` is cancelled. `failed` is told of resources that can never be served.

    Plugins scan in `turn`, for side by side they would take Python's interpreter lock from each other at every call of
    the system and need twice the time. One that waits for a device does not keep the others waiting.
    """

    def __init__(
        self,
        name: str,
        plugin: Plugin[Config],
        settings: Settings,
        watcher: Watcher,
        failed: Callable[[Exception], None],
        *,
        turn: asyncio.Lock,
    ) -> None:
        self.name = name
        self.plugin = plugin
        self.cdi = CdiDirectory(settings.cdi_dir)
        self.publisher = Publisher(plugin, settings.sockets_dir, self.cdi, failed)
        self.health = HealthTracker(name)
        self.inventory = Inventory()
        self.looked = asyncio.Event()
        self.scans = 0
        self.scan_failures = 0
        self.scan_seconds = 0.0
        self.problem = ""
        self._settings = settings
        self._watcher = watcher
        self._turn = turn
        self._wake = asyncio.Event()
        self._health_wake = Pulse()
        self._publishing = asyncio.Lock()
        self._blind_since: float | None = None
        self._retry = _FIRST_RETRY
        self._linger = plugin.linger
        self._farewells: dict[tuple[str, str], float] = {}
        self._touched: frozenset[str] = frozenset()
        self._skipped: frozenset[Skipped] = frozenset()
        self._notes: frozenset[str] = frozenset()
        self._cdi_published: Collection[str] = ()
        self._stale_cdi = True
        self._cdi_names: dict[tuple[str, str], str] = {}
        self._pruning: asyncio.Task[None] | None = None
        self._labels: LabelFile | None = None
        if settings.nfd_dir and plugin.overrides("labels"):
            self._labels = LabelFile(os.path.join(settings.nfd_dir, f"accelplane-{name}.txt"))
        self._background: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Looks and publishes for ever; cancelled, it ends its servers."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_looking())
                group.create_task(self._keep_judging())
                if self.plugin.overrides("explain"):
                    group.create_task(self._explain())
                self._start_background()
        finally:
            beside = [task for task in (self._background, self._pruning) if task is not None]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            self._watcher.forget(self.name)
            await self.publisher.close()
            if self._labels is not None:
                self._labels.remove()
            if not self._settings.keep_cdi:
                self.cdi.remove_written()

    def look_again(self) -> None:
        """Asks for a look soon."""
        self._wake.set()

    def reconfigure(self, plugin: Plugin[Config], settings: Settings) -> None:
        """Goes on with other times, and with `plugin`, which has the same namespace, if its options are others."""
        if plugin.config != self.plugin.config:
            log.info("plugin %s has new options", self.name)
            self.plugin = plugin
            # What the new options no longer want did not vanish.
            self._linger = Plugin.linger
            self._farewells.clear()
            self.publisher.replace_plugin(plugin)
            self._start_background()
        elif settings == self._settings:
            return
        self._settings = settings
        self._look_and_judge()

    @property
    def blind(self) -> bool:
        """Whether the last scan failed."""
        return self._blind_since is not None

    @property
    def blind_too_long(self) -> bool:
        """Whether scans have failed for longer than what was found last can be trusted."""
        return self._blind_since is not None and time.monotonic() - self._blind_since >= self._settings.scan_grace

    def _look_and_judge(self) -> None:
        self._wake.set()
        self._health_wake.fire()

    async def _keep_looking(self) -> None:
        credit, last = _MOST_CREDIT, time.monotonic()
        while True:
            self._wake.clear()
            start = time.monotonic()
            credit = min(credit + _SHARE_OF_TIME * (start - last), _MOST_CREDIT)
            # What takes longer waits for a device, which costs nothing.
            credit -= min(await self._look(), _MOST_CHARGE)
            last = time.monotonic()
            self.looked.set()
            await self._until_next()
            if credit < 0:
                await asyncio.sleep(-credit / _SHARE_OF_TIME)

    async def _until_next(self) -> None:
        """Returns when it is time to look again: something happened and settled, or nothing did for long."""
        try:
            async with asyncio.timeout(self._longest_wait()):
                await self._wake.wait()
        except TimeoutError:
            return
        settled_by = time.monotonic() + _SETTLE_AT_MOST
        while self._wake.is_set() and time.monotonic() < settled_by:
            self._wake.clear()
            await asyncio.sleep(_SETTLE)

    def _longest_wait(self) -> float:
        wait = self._settings.safety_interval
        if not self._watcher.sees_all:
            wait = min(wait, self._settings.blind_interval)
        if self.blind:
            wait = min(wait, self._retry)
        if self._farewells:
            wait = min(wait, max(0.0, min(self._farewells.values()) - time.monotonic()))
        return wait

    async def _look(self) -> float:
        """Looks and publishes; returns the seconds of work that it took, without the wait for services."""
        plugin = self.plugin
        host = Host(self._settings.root)
        start = time.monotonic()
        try:
            try:
                await self._refresh(plugin, host)
            finally:
                start = time.monotonic()
            inventory = await self._scan(plugin, host)
        except Exception as error:  # noqa: BLE001 - a plugin's own scan may raise anything; the others go on
            self._failed_to_see(error)
            self._watch(host, seen=False)
        else:
            self._saw(inventory, host)
            self._watch(host, seen=True)
            self.scan_seconds = time.monotonic() - start
        work = time.monotonic() - start
        await self._judge_newcomers()
        start = time.monotonic()
        await self._publish()
        if plugin is self.plugin:
            self._linger = plugin.linger
        return work + time.monotonic() - start

    async def _refresh(self, plugin: Plugin[Config], host: Host) -> None:
        if not plugin.overrides("refresh"):
            return
        try:
            async with asyncio.timeout(_REFRESH_DEADLINE):
                await plugin.refresh(host)
        except TimeoutError:
            raise ScanError(f"a service that the scan needs did not answer within {_REFRESH_DEADLINE:g} s") from None

    async def _scan(self, plugin: Plugin[Config], host: Host) -> Inventory:
        async with self._turn:
            scan = asyncio.ensure_future(in_thread(lambda: _prepared_and_scanned(plugin, host)))
            self.scans += 1
            await asyncio.wait((scan,), timeout=_LONGEST_TURN)
        while True:
            done, _pending = await asyncio.wait((scan,), timeout=_SCAN_PATIENCE)
            if done:
                return scan.result()
            self._failed_to_see(
                ScanError(f"a device does not answer, the scan has taken more than {_SCAN_PATIENCE:g} s")
            )
            await self._publish()

    def _saw(self, inventory: Inventory, host: Host) -> None:
        if self._blind_since is not None:
            log.info("%s: scanning works again", self.name)
        self._blind_since = None
        self._retry = _FIRST_RETRY
        self.problem = ""
        self.inventory = inventory
        skipped, notes = frozenset(inventory.skipped), frozenset(host.notes)
        for skip in sorted(skipped - self._skipped, key=lambda skip: skip.subject):
            level = logging.WARNING if skip.warning else logging.INFO
            log.log(level, "%s: %s not published: %s", self.name, skip.subject, skip.reason)
        for note in sorted(notes - self._notes):
            log.warning("%s: %s", self.name, note)
        self._skipped, self._notes = skipped, notes

    def _failed_to_see(self, error: Exception) -> None:
        self.scan_failures += 1
        if self._blind_since is None:
            self._blind_since = time.monotonic()
        else:
            self._retry = min(2 * self._retry, _LAST_RETRY)
        expected = isinstance(error, (HostError, ScanError, OSError))
        problem = str(error) or type(error).__name__
        if problem != self.problem:
            self.problem = problem
            log.error(
                "%s: scan failed: %s; what was found last stays advertised for %g s",
                self.name,
                problem if expected else f"{type(error).__name__}: {problem}",
                self._settings.scan_grace,
                exc_info=None if expected else error,
            )

    def _watch(self, host: Host, *, seen: bool) -> None:
        """Watches what the scan read: of a scan that failed half way also what the one before it read."""
        watch = self.plugin.watch
        touched = frozenset(host.touched).union(watch.directories)
        self._touched = touched if seen else touched | self._touched
        own_tree = self._settings.root != "/"
        # The kernel reports changes in sysfs by uevents only; in a tree of plain files there are none.
        prefix = host.root.rstrip("/")
        directories = [
            f"{prefix}{path}" if path in host.touched else _place(host, path)
            for path in self._touched
            if own_tree or not path.startswith(("/sys/", "/proc/"))
        ]
        root = self._settings.root if own_tree else ""
        self._watcher.directories(self.name, directories, self._look_and_judge, written=own_tree, root=root)
        self._watcher.uevents(self.name, watch.subsystems or _subsystems(self._touched), self._look_and_judge)

    async def _explain(self) -> None:
        try:
            explanation = await in_thread(lambda: explained(self.plugin, Host(self._settings.root)))
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            log.warning("%s: cannot explain itself: %s", self.name, str(error) or type(error).__name__)
        else:
            log.info("%s: %s", self.name, explanation.decode())

    async def _judge_newcomers(self) -> None:
        if not self.plugin.overrides("health"):
            self.health.retain(())
            return
        units = {device.unit: device for device in self.inventory}
        self.health.retain(units)
        newcomers = [device for unit, device in units.items() if unit not in self.health.states]
        if newcomers:
            await self.health.check(self.plugin, Host(self._settings.root), newcomers, _FIRST_VERDICT_DEADLINE)

    async def _keep_judging(self) -> None:
        """Asks for everybody's health from time to time, and soon again where one verdict awaits a second."""
        while True:
            interval = self._settings.health_interval or self.plugin.health_policy.interval
            checks = self.plugin.overrides("health")
            await self._health_wake.wait(self.health.next_check_in(interval) if checks else None)
            if not self.plugin.overrides("health") or not len(self.inventory):
                continue
            before = dict(self.health.states)
            await self.health.check(self.plugin, Host(self._settings.root), self.inventory)
            if self.health.states != before:
                await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:
            view = self._view(time.monotonic())
            await self._publish_cdi(view)
            before = self.publisher.inventory
            changes = self.publisher.publish(view)
            self._tell(before, changes)
            if self._labels is not None and changes:
                self._publish_labels(self._labels, view)
        if self._stale_cdi and self.plugin.cdi_kinds and (self._pruning is None or self._pruning.done()):
            # Beside all else: the kubelet may take its time to say who uses what.
            self._pruning = asyncio.create_task(self._prune_cdi(self.plugin.cdi_kinds))

    def _view(self, now: float) -> Inventory:
        """What the kubelet is told: what was found, with health, and those just gone."""
        view = self.inventory
        if self.blind_too_long:
            reason = f"cannot be seen: {self.problem}"
            view = view.replaced(replace(device, health=UNHEALTHY, reason=reason) for device in view)
        elif self.health.states:
            view = view.replaced(self.health.apply(device) for device in view)
        gone: list[Device] = []
        farewells: dict[tuple[str, str], float] = {}
        for device in self.publisher.inventory:
            key = (device.resource, device.id)
            if device.id in view.resources.get(device.resource, {}):
                continue
            until = self._farewells.get(key, now + self._linger)
            if now < until:
                farewells[key] = until
                gone.append(replace(device, health=UNHEALTHY, reason="gone from the host"))
        self._farewells = farewells
        return view.replaced(gone) if gone else view

    async def _publish_cdi(self, view: Inventory) -> None:
        devices = {device.cdi.qualified_name: device.cdi for device in view if device.cdi is not None}
        if self.plugin.cdi_kinds:
            for device in view:
                name = device.cdi.qualified_name if device.cdi is not None else ""
                self._cdi_names[device.resource, device.id] = name
        if devices.keys() != self._cdi_published:
            self._cdi_published = devices.keys()
            self._stale_cdi = True
        wanted = tuple(devices.values())
        if not all(map(self.cdi.is_current, wanted)):
            await in_thread(lambda: self.cdi.publish(wanted))

    async def _prune_cdi(self, kinds: Collection[str]) -> None:
        self._stale_cdi = False
        if not await self._pruned(kinds):
            self._stale_cdi = True

    async def _pruned(self, kinds: Collection[str]) -> bool:
        """Removes files of devices that are gone if the kubelet says that no pod uses them; whether none is left."""
        wanted = self._cdi_published
        stale = await in_thread(lambda: self.cdi.stale(kinds, wanted))
        if not stale or sockets.identity(self._settings.pod_resources_socket) is None:
            return not stale
        try:
            holders = await podresources.list_pods(self._settings.pod_resources_socket)
        except podresources.PodResourcesError as error:
            log.log(v(2), "%s: CDI files of vanished devices stay: %s", self.name, error)
            return False
        used = set(self._cdi_published)
        prefix = f"{self.plugin.namespace}/"
        for holder in holders:
            if not holder.resource.startswith(prefix):
                continue
            for id_ in holder.device_ids:
                name = self._cdi_names.get((holder.resource.removeprefix(prefix), id_))
                if name is None:
                    return False  # held since before this process: whose file it uses is not known, so all stay
                used.add(name)
        for name, file_name in stale.items():
            if name not in used:
                self.cdi.remove(name, file_name)
        return used.isdisjoint(stale)

    def _publish_labels(self, file: LabelFile, view: Inventory) -> None:
        try:
            file.write(self.plugin.labels(view))
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            log.warning("%s: labels not written: %s", self.name, str(error) or type(error).__name__)

    def _tell(self, before: Inventory, changes: Changes) -> None:
        for resource, devices in (*changes.added.items(), *changes.updated.items()):
            old = before.resources.get(resource, {})
            sick = sum(not device.healthy for device in devices.values())
            log.log(
                v(1), "%s: %s/%s devices: %d -> %d (%d unhealthy)",
                self.name, self.plugin.namespace, resource, len(old), len(devices), sick,
            )  # fmt: skip

    def _start_background(self) -> None:
        if self._background is not None:
            self._background.cancel()
            self._background = None
        if self.plugin.overrides("background"):
            self._background = asyncio.create_task(self._keep_in_background(self.plugin))

    async def _keep_in_background(self, plugin: Plugin[Config]) -> None:
        retry = _FIRST_RETRY
        while True:
            try:
                await plugin.background(Host(self._settings.root), self._look_and_judge)
                return
            except Exception:
                log.exception("%s: its background work failed, again in %g s", self.name, retry)
            await asyncio.sleep(retry)
            retry = min(2 * retry, _LAST_RETRY)


def _prepared_and_scanned(plugin: Plugin[Config], host: Host) -> Inventory:
    if plugin.overrides("prepare"):
        plugin.prepare(host)
    return scanned(plugin, host)


def scanned(plugin: Plugin[Config], host: Host) -> Inventory:
    """One scan, and the topology of devices whose plugin leaves it to the framework. Raises what the scan raises."""
    inventory = Inventory.of(plugin.namespace, plugin.scan(host))
    unplaced = [device for device in inventory if isinstance(device.topology, UnsetType)]
    if not unplaced:
        return inventory
    return inventory.replaced(_placed(host, unplaced))


def explained(plugin: Plugin[Config], host: Host) -> bytes:
    """The plugin's explanation as JSON. Raises what the plugin raises, and for values that JSON cannot hold."""
    return msgspec.json.encode(dict(plugin.explain(host)))


def _placed(host: Host, devices: Iterable[Device]) -> Iterable[Device]:
    """Devices whose plugin left the topology to the framework, with what their nodes' paths tell."""
    known: dict[tuple[str, ...], tuple[int, ...] | None] = {}
    for device in devices:
        paths = tuple(node.host_path for node in device.nodes)
        if paths not in known:
            known[paths] = host.topology_of_nodes(paths)
        yield replace(device, topology=known[paths])


def _place(host: Host, directory: str) -> str:
    """Where to watch for `directory`: itself, or where the way to it ends in links that loop."""
    while True:
        try:
            return host.local(directory)
        except HostError:
            directory = os.path.dirname(directory)


def _subsystems(touched: Collection[str]) -> frozenset[str] | None:
    """Subsystems whose uevents may change what a scan read: those named by class and bus directories.

    All (None) when it read sysfs in other places, none when it did not read sysfs.
    """
    named: set[str] = set()
    read_sysfs = False
    for path in touched:
        parts = path.split("/")
        if parts[1] != "sys":
            continue
        read_sysfs = True
        if len(parts) > 3 and parts[2] in ("class", "bus"):
            named.add(parts[3])
    return frozenset(named) if named or not read_sysfs else None
