"""Runs one plugin: its scan loop, health loop and background task, and publishes the results.

Each publication computes the devices to list from the last scan, the health states and the IDs that have to stay, then
writes CDI files, then updates the kubelet's lists, then labels.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence

from accelplane.devices import UNHEALTHY, Device, Inventory, Verdict
from accelplane.host import Host
from accelplane.host.isolation import HostThread
from accelplane.node.advertised import DEPARTED, Departure, Departures, Key, with_departed, with_health, without
from accelplane.node.allocations import AllocationReader, Reading
from accelplane.node.context import PluginContext
from accelplane.node.health_loop import HealthLoop
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.publishers.kubelet import KubeletPublisher
from accelplane.node.publishers.labels import LabelPublisher
from accelplane.node.scan_loop import FIRST_RETRY, LAST_RETRY, ScanLoop, explanation
from accelplane.node.settings import Settings
from accelplane.node.status import PluginStatus, UnitHealth
from accelplane.node.watcher import Watcher
from accelplane.plugins import Config, Plugin

log = logging.getLogger(__name__)

_FIRST_RECHECK, _LAST_RECHECK = 1.0, 10.0
_RESEND_INTERVAL = 30.0


class PluginRunner:
    """Runs a plugin until `run` is cancelled. Every task and thread that it starts has ended then."""

    def __init__(
        self,
        context: PluginContext,
        watcher: Watcher,
        allocations: AllocationReader,
        unservable: Callable[[Exception], None],
        *,
        thread: HostThread,
        turn: asyncio.Lock,
    ) -> None:
        """`thread` runs the scans. It belongs to the caller, because a scan that hangs may outlive this runner."""
        self.context = context
        self.cdi = CdiPublisher(context, allocations)
        self.publisher = KubeletPublisher(context, self.cdi, unservable)
        self.scan = ScanLoop(context, watcher, thread, turn, changed=self.request_check, publish=self._apply_scan)
        self.health = HealthLoop(context, self.publish)
        self._labels = LabelPublisher(context)
        self._watcher = watcher
        self._allocations = allocations
        self._thread = thread
        self._explain_thread, self._background_thread = HostThread(context.blocked), HostThread(context.blocked)
        self._publishing = asyncio.Lock()
        self._departures: Departures = {}
        self._departed = asyncio.Event()
        # The delay of the plugin is for devices that this runner has found.
        self._removal_delay = Plugin.removal_delay
        self._created = time.monotonic()
        self._reading: Reading | None = None
        self._resent = -math.inf
        self._prune: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._running = False
        self._ending = False

    async def run(self) -> None:
        """Scans, checks health and publishes until cancelled; then ends the servers."""
        name = self.context.name
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_run_checked(self.scan.run()))
                group.create_task(_run_checked(self.health.run()))
                group.create_task(_run_checked(self._release_departed()))
                if self.context.plugin.overrides("explain"):
                    group.create_task(self._log_explanation())
                self._start_background()
        finally:
            self._ending = True
            tasks = [*self._background, *([self._prune] if self._prune is not None else [])]
            for task in tasks:
                task.cancel()
            self._watcher.forget(name)
            await self.publisher.close()
            self._labels.close()
            await asyncio.gather(*tasks, return_exceptions=True)  # a background task may wait for a thread
            await self.cdi.close(remove=not self.context.settings.keep_cdi)
            for thread in (
                self._thread,
                self._explain_thread,
                self._background_thread,
                *self.health.threads,
                self._labels.thread,
            ):
                await thread.wait_idle(name)

    def request_check(self) -> None:
        self.scan.request()
        self.health.request()

    def reconfigure(self, plugin: Plugin[Config], settings: Settings) -> None:
        """Continues with `settings` and, if its options differ, with `plugin`, which has the same namespace.

        A runner that is ending changes nothing: its successor gets the new plugin and settings.
        """
        if self._ending:
            return
        if plugin.config != self.context.plugin.config:
            log.info("plugin %s has new options", self.context.name)
            self.context.use(plugin)
            # IDs that the new options exclude have not vanished: the delay of the plugin is not for them.
            self._removal_delay = Plugin.removal_delay
            until = time.monotonic() + self._removal_delay
            self._departures = {
                key: Departure(each.since, min(each.until, until)) for key, each in self._departures.items()
            }
            self._departed.set()
            if self._running:  # otherwise `run` starts it, or is cancelled before its first step
                self._start_background()
        elif settings == self.context.settings:
            return
        self.context.settings = settings
        self.request_check()

    def status(self, *, crashed: bool) -> PluginStatus:
        tracker, directory = self.health.tracker, self.cdi.directory
        none = Verdict("good")
        return PluginStatus(
            name=self.context.name,
            namespace=self.context.plugin.namespace,
            crashed=crashed,
            scan=self.scan.status,
            resources=self.publisher.status(),
            health={
                unit: UnitHealth(
                    phase=state.phase,
                    cause=state.cause,
                    reason=state.reason,
                    unknown=tracker.unknown.get(unit, ""),
                    warning=tracker.warnings.get(unit, none).reason,
                    warning_cause=tracker.warnings.get(unit, none).cause,
                    changes=tracker.history.changes(unit),
                    unhealthy_seconds=tracker.history.unhealthy_seconds(unit),
                )
                for unit, state in tracker.states.items()
            },
            failures=dict(tracker.history.failures),
            recoveries=tracker.history.recoveries,
            skipped=self.context.devices.found.skipped,
            problems=self.context.problems.texts,
            unlisted=self._unlisted(),
            cdi_writes=directory.writes,
            cdi_write_failures=directory.write_failures,
        )

    @property
    def outdated(self) -> str:
        """Why scans have failed for longer than the grace period, empty if they have not."""
        return f"scan fails: {self.scan.problem}" if self.scan.outdated else ""

    @property
    def allocations(self) -> int:
        """The number of Allocate calls that the kubelet has sent."""
        return sum(served.server.counters.allocations for served in self.publisher.served.values())

    def allocated_at(self, resource: str, ids: Iterable[str]) -> float | None:
        """The Unix time of the last Allocate call for IDs of a qualified resource, None if it is not known."""
        namespace, _, name = resource.rpartition("/")
        calls = self.publisher.calls.get(name) if namespace == self.context.plugin.namespace else None
        return calls.allocated_at(ids) if calls is not None else None

    async def _apply_scan(self) -> float:
        await self.health.check_new_devices()
        if self.context.units is not None:
            await self.context.units.observe(self.context.devices.found)
        start = time.monotonic()
        self.context.devices.checked = self.context.devices.found
        await self.publish()
        if self.scan.plugin is self.context.plugin:
            self._removal_delay = self.context.plugin.removal_delay
        return time.monotonic() - start

    async def publish(self) -> None:
        """Publishes the devices, with their health, to the kubelet, and their CDI files and labels."""
        async with self._publishing:
            if self._reading is None:
                self._reading = await self._allocations.read(self._created, ask_kubelet=False)
                self._departed.set()
            inventory = (
                self.context.devices.checked
            )  # a scan may replace it during the await: its CDI files are not written then
            listed, departures = self._add_departed(inventory)
            # The containers of claims may use the files of devices that are not listed.
            described = listed if self.context.units is None else (*listed, *inventory)
            if await self.cdi.publish(inventory, described):
                listed, departures = self._add_departed(inventory)  # health and calls may have changed during the await
            for resource, id_ in self._departures.keys() - departures.keys():
                if id_ not in listed.resources.get(resource, {}):
                    self.publisher.calls[resource].forget(id_)
            if departures.keys() - self._departures.keys():
                self._departed.set()
            self._departures = departures
            self.publisher.publish(listed)
            await self._labels.publish(listed)
        self.context.changed()
        if self.cdi.needs_prune and (self._prune is None or self._prune.done()):
            # In the background: it waits for the kubelet.
            self._prune = asyncio.create_task(self.cdi.prune())

    def _add_departed(self, inventory: Inventory) -> tuple[Inventory, Departures]:
        """The devices to list, and those of them that are not in `inventory`."""
        tracker, plugin = self.health.tracker, self.context.plugin
        withheld = self.context.units.withheld(inventory) if self.context.units is not None else ()
        offered = without(inventory, withheld) if withheld else inventory
        present = with_health(offered, tracker.apply if tracker.states else None, self.outdated)
        known = self.context.devices.listed
        held = [
            device
            for device in _placeholders(plugin.namespace, self._reading)
            if device.id not in known.resources.get(device.resource, {})
            and (
                plugin.exclusive_namespace
                or device.resource in present.resources
                or (device.resource, device.id) in withheld
            )
        ]
        return with_departed(
            present,
            (*known, *held),
            self._departures,
            now=time.monotonic(),
            removal_delay=self._removal_delay,
            must_stay=self._must_stay,
            withheld=withheld,
        )

    def _must_stay(self, device: Device, departure: Departure) -> bool:
        calls = self.publisher.calls[device.resource]
        name = f"{self.context.plugin.namespace}/{device.resource}"
        return calls.must_stay(name, device.id, departure.since, self._reading)

    def _unlisted(self) -> Sequence[Device]:
        """The devices of the last scan that are not listed because dynamic resource allocation hands them out."""
        if self.context.units is None:
            return ()
        listed = self.context.devices.listed.resources
        checked = self.context.devices.checked
        return [self.health.tracker.apply(each) for each in checked if each.id not in listed.get(each.resource, {})]

    async def _release_departed(self) -> None:
        """Reads allocations while removed devices are listed, until no container holds them.

        Also if the first reading, which is made without the kubelet, is not conclusive.
        """
        await self._departed.wait()
        if self._reading is not None and self._reading.record != "read":
            self._reading = await self._allocations.read(time.monotonic())
            await self.publish()
        interval = _FIRST_RECHECK
        while True:
            self._departed.clear()
            reading = self._reading
            unknown = reading is not None and reading.record == "unreadable"
            read = reading.began if reading is not None else -math.inf
            until = [departure.until for departure in self._departures.values() if departure.until < math.inf]
            unread = [deadline for deadline in until if deadline > read]
            if unread:
                interval = _FIRST_RECHECK
                wait = max(0.0, min(unread) - time.monotonic())
            else:
                wait = interval if until or unknown else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._departed.wait()
                    continue
            if not unread:
                interval = min(2 * interval, _LAST_RECHECK)
            ended = reading.ended if reading is not None else frozenset[Key]()
            self._reading = await self._allocations.read(time.monotonic())
            await self.publish()
            if self._refresh_checkpoint(self._reading, ended):
                interval = _FIRST_RECHECK

    def _refresh_checkpoint(self, reading: Reading, before: Collection[tuple[str, str]]) -> bool:
        """Resends lists if only the checkpoint reports that a removed device is held: it may be outdated.

        Immediately for IDs that were not so `before`, otherwise after an interval. Returns whether lists were resent.
        """
        prefix = f"{self.context.plugin.namespace}/"
        ended = {key for key in self._departures if (prefix + key[0], key[1]) in reading.ended}
        overdue = time.monotonic() - self._resent >= _RESEND_INTERVAL
        if not ended or not (overdue or any((prefix + resource, id_) not in before for resource, id_ in ended)):
            return False
        self._resent = time.monotonic()
        self.publisher.resend({resource for resource, _id in ended})
        return True

    async def _log_explanation(self) -> None:
        plugin, root = self.context.plugin, self.context.settings.root
        try:
            text, _host = await self._explain_thread.run(Host(root), lambda host: explanation(plugin, host))
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            log.warning("%s: explain failed: %s", self.context.name, str(error) or type(error).__name__)
        else:
            log.info("%s: %s", self.context.name, text.decode())

    def _start_background(self) -> None:
        """Replaces the background task by one of the current plugin."""
        for task in self._background:
            task.cancel()
        plugin, pod_allocator = self.context.plugin, self.context.pod_allocator
        if plugin.overrides("background"):
            host = Host(self.context.settings.root)
            host.thread = self._background_thread
            self._start_task("background", lambda: plugin.background(host.fresh(), self.request_check))
        if pod_allocator is not None:
            self._start_task("pod_allocator", pod_allocator.run)

    def _start_task(self, hook: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.create_task(self._run_background(hook, work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run_background(self, hook: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        retry = FIRST_RETRY
        while True:
            try:
                await _run_checked(self.context.call(hook, work))
                return
            except Exception:
                log.exception("%s: background task failed; retrying in %g s", self.context.name, retry)
            await asyncio.sleep(retry)
            retry = min(2 * retry, LAST_RETRY)


def _placeholders(namespace: str, reading: Reading | None) -> Iterator[Device]:
    """Devices for the IDs of `namespace` that containers hold. Only names and NUMA nodes are known.

    The NUMA nodes matter: a restarted kubelet computes the topology hints of running pods from them.
    """
    for (name, id_), nodes in reading.held.items() if reading is not None else ():
        owner, _, resource = name.partition("/")
        if owner == namespace:
            yield Device(resource=resource, id=id_, health=UNHEALTHY, reason=DEPARTED, topology=tuple(nodes) or None)


async def _run_checked(work: Awaitable[None]) -> None:
    """Runs a loop or a hook. A `CancelledError` that a hook raises becomes an error, not the silent end of the task."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError("a plugin's hook raised CancelledError") from None
        raise
