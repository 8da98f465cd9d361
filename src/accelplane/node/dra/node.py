"""The families of an agent whose units may belong to DRA, each with its driver."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from accelplane.apiserver import ApiError, ApiServer, load_config
from accelplane.dra.events import EventWriter, Reason
from accelplane.dra.journal import JournalError
from accelplane.dra.publisher import Pace
from accelplane.dra.slicewatch import SliceWatches
from accelplane.host.isolation import BlockedDevices
from accelplane.kubelet.notifier import Notifier
from accelplane.node.allocations import AllocationReader
from accelplane.node.device_api import record_name
from accelplane.node.dra.driver import Driver, NodeAccess
from accelplane.node.dra.driverview import NO_DRIVER
from accelplane.node.dra.family import FamilyUnits
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import DraStatus
from accelplane.node.watcher import Watcher
from accelplane.plugins.base import Plugin

log = logging.getLogger(__name__)

_RESTART_DELAY = 10.0
_IDLE_TIMEOUT = 60.0  # of connections to the API server
_STOP_TIMEOUT = 28.0  # Kubernetes ends a pod after 30 s


def node_access(environment: Mapping[str, str]) -> NodeAccess:
    """The API server by the service account of the pod, or by KUBECONFIG. Raises `ConfigurationError`."""
    node = environment.get("NODE_NAME", "")
    if not node:
        raise ConfigurationError("dra-api: NODE_NAME is not set, expected the name of this node (spec.nodeName)")
    try:
        api = ApiServer(load_config(), idle_timeout=_IDLE_TIMEOUT)
        api.check()
    except ApiError as error:
        raise ConfigurationError(f"dra-api: dynamic resource allocation needs the API server: {error}") from error
    return NodeAccess(api=api, node=node, instance=environment.get("POD_UID", ""))


class NodeDra:
    """The families by plugin name. `runners` are those of the agent; `changes` are notified after all changes."""

    def __init__(
        self,
        *,
        runners: Mapping[str, PluginRunner],
        allocations: AllocationReader,
        blocked: BlockedDevices,
        watcher: Watcher,
        changes: Notifier,
        access: Callable[[], NodeAccess],
    ) -> None:
        """`access` raises `ConfigurationError`."""
        self.families: dict[str, Family] = {}
        self._runners = runners
        self._allocations = allocations
        self._blocked = blocked
        self._watcher = watcher
        self._changes = changes
        self._make_access = access
        self._access: NodeAccess | None = None
        self._events: EventWriter | None = None
        self._watches: SliceWatches | None = None
        self._pace = Pace()

    def check(self, settings: Settings, names: Iterable[str], plugins: Mapping[str, Plugin[Any]]) -> None:
        """Raises `ConfigurationError` if a family shall use DRA and the API server cannot be used.

        Also if the namespace of a family's plugin changes, whose driver would have to unprepare its claims.
        """
        apis = settings.device_apis
        for name in self.families.keys() & self._runners.keys() & plugins.keys():
            found, expected = plugins[name].namespace, self._runners[name].context.plugin.namespace
            if found != expected:
                raise ConfigurationError(
                    f"plugins.{name}: the namespace is {found!a}, expected {expected!a} while its devices may be for "
                    f"claims; end their pods, remove {name} from dra-api and try again"
                )
        if self._access is not None:
            return
        try:
            self._access = self._make_access()
            self._events = EventWriter(self._access.api, self._access.node)
            self._watches = SliceWatches(self._access.api, self._access.node)
        except ConfigurationError as error:
            if "dra" in apis.devices.values() or any(apis.of_family(name) == "dra" for name in names):
                raise
            log.error("units that belong to dynamic resource allocation cannot change back: %s", error)

    def configure(
        self, settings: Settings, names: Iterable[str], enabled: Mapping[str, Plugin[Any]]
    ) -> Iterable["Family"]:
        """Applies the settings, ends the families of plugins that are not `enabled`, and returns those that are new.

        The owner runs them.
        """
        for name, family in list(self.families.items()):
            family.units.settings = settings
            family.ending = name not in enabled
        new = [name for name in names if name not in self.families]
        for name in new:
            units = FamilyUnits(
                name,
                settings,
                runner=lambda name=name: self._runners.get(name),
                allocations=self._allocations,
                blocked=self._blocked,
                on_event=partial(self._record_event, name),
                record=record_name(name, enabled[name]),
            )
            self.families[name] = Family(units, self._driver, self._changes, self._remove)
        return [self.families[name] for name in new]

    def directory_changed(self) -> None:
        """Device plugins may have created or removed sockets."""
        for family in self.families.values():
            family.units.other_plugin.directory_changed()
        self._changes.notify_all()

    def status(self) -> Mapping[str, DraStatus]:
        return {name: family.status() for name, family in self.families.items()}

    def prepared_or_unprepared(self) -> int:
        """The number of claims for which the drivers have changed what containers have."""
        return sum(family.prepared_or_unprepared for family in self.families.values())

    async def stop(self) -> None:
        """Ends the drivers when the kubelet's calls in progress have ended. They do not start again."""
        await asyncio.gather(*(family.stop() for family in self.families.values()))
        if self._events is not None:
            await self._events.close()
        if self._access is not None:
            self._access.api.close()

    def _record_event(self, name: str, reason: Reason, text: str) -> None:
        """Of the family `name`."""
        runner = self._runners.get(name)
        if self._events is not None and runner is not None:
            self._events.record(runner.context.plugin.namespace, reason, text)

    def _driver(self, units: FamilyUnits) -> Driver | None:
        runner = self._runners.get(units.name)
        if self._access is None or self._events is None or self._watches is None or runner is None:
            return None
        return Driver(
            runner.context.plugin,
            units,
            self._access,
            self._pace,
            self._watches,
            events=self._events,
            watcher=self._watcher,
            changed=self._changes,
        )

    def _remove(self, name: str) -> None:
        """All units belong to the device plugin again."""
        del self.families[name]
        if (runner := self._runners.get(name)) is not None:
            runner.context.units = None


class Family:
    """Lets the units of a plugin change their owners, and runs the driver while it is needed."""

    def __init__(
        self,
        units: FamilyUnits,
        driver: Callable[[FamilyUnits], Driver | None],
        changes: Notifier,
        ended: Callable[[str], None],
    ) -> None:
        self.units = units
        self._make_driver = driver
        self._changes = changes
        self._ended = ended
        self._driver: Driver | None = None
        self._task: asyncio.Task[None] | None = None
        self._problem = ""
        self.ending = False  # the plugin is disabled
        self._stopping = False

    async def run(self, _watcher: Watcher) -> None:
        """Returns when the plugin is disabled, or all units belong to its device plugin and nothing else is wanted."""
        self.units.reopen()
        self._stopping = False
        try:
            while not self.ending:
                count = self._changes.count
                delay = await self.units.reconcile()
                self._update_driver()
                if self._driver is None and self.units.is_plugin_only:
                    break
                if self._changes.count == count:
                    await self._changes.wait(delay)
            await self.stop()
            if self.ending and self._driver is not None:
                self._driver.remove_label()
            self._ended(self.units.name)
        finally:
            await self.stop()
            await self.units.close()

    async def stop(self) -> None:
        """Ends the driver when the kubelet's calls in progress have ended. `run` does not start it again."""
        self._stopping = True
        driver, task = self._driver, self._task
        if driver is not None and task is not None:
            driver.stop()
            await asyncio.wait((task,), timeout=_STOP_TIMEOUT)
            task.cancel()
            await asyncio.wait((task,))

    def status(self) -> DraStatus:
        if self._driver is not None:
            status = self._driver.status()
            return replace(status, problems=(self._problem, *status.problems)) if self._problem else status
        problems = (self._problem, self.units.problem, self.units.other_plugin.problem)
        return DraStatus(problems=tuple(filter(None, problems)))

    @property
    def prepared_or_unprepared(self) -> int:
        return self._driver.prepared_or_unprepared if self._driver is not None else 0

    def _update_driver(self) -> None:
        """Starts the driver when it is needed, and ends it when nothing is left of it."""
        if self._task is not None and self._task.done():
            self._driver = self._task = None
            self.units.driver = NO_DRIVER
        if self._driver is None and self.units.uses_dra and not self._stopping:
            try:
                self._driver = self._make_driver(self.units)
            except ValueError as error:
                self._report(str(error))
            if self._driver is not None:
                self._task = asyncio.create_task(self._run_driver(self._driver))
        elif self._driver is not None:
            is_needed = self.units.uses_dra or not self._driver.is_unused
            if not is_needed or not self._driver.is_current(self.units.settings):
                self._driver.stop()

    async def _run_driver(self, driver: Driver) -> None:
        logged = ""
        while True:
            self._problem = ""
            try:
                await driver.run()
            except Exception as error:
                self._problem = str(error) or type(error).__name__
                crashed = not isinstance(error, (JournalError, OSError))
                if crashed or self._problem != logged:
                    log.error(
                        "DRA driver %s: %s; retrying every %g s", driver.name, self._problem, _RESTART_DELAY,
                        exc_info=error if crashed else None,
                    )  # fmt: skip
                logged = self._problem
            else:
                break
            self._changes.notify_all()
            await asyncio.sleep(_RESTART_DELAY)
        self._changes.notify_all()

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s: %s", self.units.name, problem)
        self._problem = problem
