"""The agent: one process that runs any number of plugins against one kubelet.

It owns the objects that plugins share: the watcher, the reader of allocations, the configuration. A plugin
that fails is logged and reported as not ready; the others are not affected.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from accelplane import __version__
from accelplane.devices import Inventory
from accelplane.host.isolation import BlockedDevices, HostThread
from accelplane.kubelet import sockets
from accelplane.kubelet.notifier import Notifier
from accelplane.kubelet.registration import KUBELET_SOCKET
from accelplane.node.allocations import AllocationReader
from accelplane.node.atomic_file import Stamp, stamp_of
from accelplane.node.context import PluginContext
from accelplane.node.device_api import record_name
from accelplane.node.event_store import EventStore
from accelplane.node.hardware_events import HardwareEvents
from accelplane.node.hook_problems import HookProblems
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import NodeStatus, SkippedPlugin
from accelplane.node.watcher import Watcher
from accelplane.plugins import Config, Plugin
from accelplane.plugins.base import NodePods

if TYPE_CHECKING:
    from accelplane.node.dra.driver import NodeAccess
    from accelplane.node.dra.node import NodeDra

log = logging.getLogger(__name__)

Plugins = Mapping[str, Plugin[Config]]

# A service beside the plugins, for as long as the agent runs.
Service = Callable[[Watcher], Coroutine[None, None, None]]

_CONFIG_DEBOUNCE = 0.1
_RESTART_DELAY = 10.0


class Agent:
    """Runs `plugins` until `stop` is called.

    `reload` is called after a change in `config_file`'s directory. It returns the settings and plugins to run from then
    on, or raises `ConfigurationError` to keep the present ones. `services` run beside the plugins, by name.
    `pods` is called once if a plugin needs the pods of the node, `dra` if units may belong to dynamic resource
    allocation. They raise `ConfigurationError` if that is not possible. `skipped` returns the plugins that do not run.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        *,
        config_file: str | None = None,
        reload: Callable[[], tuple[Settings, Plugins]] | None = None,
        services: Mapping[str, Service] | None = None,
        pods: Callable[[Settings], NodePods] | None = None,
        skipped: Callable[[], Sequence[SkippedPlugin]] = tuple,
        dra: "Callable[[], NodeAccess] | None" = None,
        program: str = "accelplane-node",
    ) -> None:
        self.settings = settings
        self.program = program
        # Notifies after changes of devices, health, registration and allocations.
        self.changes = Notifier()
        self.runners: dict[str, PluginRunner] = {}
        self.config_problem = ""
        self._plugins = dict(plugins)
        self._config_file = os.path.abspath(config_file) if config_file is not None else None
        self._reload = reload
        self.services = dict(services or {})
        self._make_pods = pods
        self._skipped = skipped
        self._pods: NodePods | None = None
        self._make_node_access = dra
        self.dra: NodeDra | None = None
        self._provide_pods(settings, plugins)
        self.events = HardwareEvents(self._hardware_changed, EventStore(settings.cdi_dir, settings.root))
        self.blocked = BlockedDevices(self._blocked_changed)
        self._watcher = Watcher(self.events.record)
        self._allocations = AllocationReader(settings)
        self._turn = asyncio.Lock()
        self._threads: dict[str, HostThread] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dra_tasks: set[asyncio.Task[None]] = set()
        self._crashed: set[str] = set()
        self._stop = asyncio.Event()
        self._fatal: Exception | None = None
        self._unservable: Exception | None = None
        self._config_changed = asyncio.Event()
        self._config_read = self._config_stamp()
        self._provide_dra(settings, plugins)

    def status(self) -> NodeStatus:
        return NodeStatus(
            version=__version__,
            root=self.settings.root,
            kubelet_dir=self.settings.kubelet_dir,
            config_problem=self.config_problem,
            plugins={name: runner.status(crashed=name in self._crashed) for name, runner in self.runners.items()},
            skipped_plugins=self._skipped(),
            uevents=dict(self._watcher.uevent_counts),
            recoveries=dict(self.events.recoveries),
            wedged=dict(self.events.wedged),
            dra=self.dra.status() if self.dra is not None else {},
        )

    def allocations(self) -> int:
        """The number of Allocate calls that the kubelet has sent, and of claims that were prepared or unprepared."""
        claims = self.dra.prepared_or_unprepared() if self.dra is not None else 0
        return claims + sum(runner.allocations for runner in self.runners.values())

    def allocated_at(self, resource: str, ids: Iterable[str]) -> float | None:
        """The Unix time of the last Allocate call for IDs of a qualified resource, None if it is not known."""
        ids = frozenset(ids)
        times = (runner.allocated_at(resource, ids) for runner in self.runners.values())
        return next((time for time in times if time is not None), None)

    def inventories(self) -> Mapping[str, tuple[Plugin[Config], Inventory]]:
        """Each plugin with the devices that its last scan found."""
        return {name: (runner.context.plugin, runner.context.devices.found) for name, runner in self.runners.items()}

    def problems(self, name: str) -> HookProblems:
        """The problems of a plugin's hooks. Those of a plugin that does not run are logged only."""
        runner = self.runners.get(name)
        return runner.context.problems if runner is not None else HookProblems(name)

    def stop(self) -> None:
        """Ends `run`: the sockets are removed and the kubelet's streams end."""
        self._stop.set()

    async def run(self) -> None:
        """Raises `ConfigurationError` if nothing can ever be served with these settings."""
        check_kubelet_directory(self.settings)
        log.info(
            "accelplane %s: plugins %s, root %s, kubelet %s",
            __version__, ", ".join(self._plugins) or "none", self.settings.root, self.settings.kubelet_dir,
        )  # fmt: skip
        self._watcher.start()
        self.events.restore()
        self._watcher.directories("kubelet", (self.settings.sockets_dir,), self._kubelet_directory_changed)
        services = {**self.services, "startup check": self._check_startup}
        if self._config_file is not None:
            directory = os.path.dirname(self._config_file)
            self._watcher.directories("config", (directory,), self._config_changed.set, written=True)
            services["configuration"] = self._follow_config
        tasks = [asyncio.create_task(self._supervise_service(*each)) for each in services.items()]
        try:
            self._configure_dra()
            for name in self._plugins:
                self._start(name)
            await self._stop.wait()
        finally:
            if self.dra is not None:
                await self.dra.stop()
            await _end_tasks(*self._dra_tasks)
            # The tasks that start plugins end first, then the plugins.
            await _end_tasks(*tasks)
            await _end_tasks(*self._tasks.values())
            await self._allocations.close()
            self._watcher.close()
        if self._fatal is not None:
            raise self._fatal

    async def _supervise_service(self, name: str, service: Service) -> None:
        """Runs a service; restarts it after an internal error."""
        while (error := await _run(service(self._watcher))) is not None:
            log.error("%s crashed; retrying in %g s", name, _RESTART_DELAY, exc_info=error)
            await asyncio.sleep(_RESTART_DELAY)

    async def _supervise_plugin(self, name: str) -> None:
        """Runs a plugin; restarts it after an internal error, with the plugin object and settings valid by then."""
        while True:
            self._crashed.discard(name)
            error = await _run(self.runners[name].run())
            log.error("plugin %s crashed; retrying in %g s", name, _RESTART_DELAY, exc_info=error)
            self._crashed.add(name)
            self.changes.notify_all()
            await asyncio.sleep(_RESTART_DELAY)
            self.runners[name] = self._runner(name)

    def _runner(self, name: str) -> PluginRunner:
        plugin, changed = self._plugins[name], self.changes.notify_all
        context = PluginContext(
            name, plugin, self.settings, self._pods, changed=changed, events=self.events, blocked=self.blocked
        )
        if self.dra is not None and name in self.dra.families:
            context.units = self.dra.families[name].units
        return PluginRunner(
            context,
            self._watcher,
            self._allocations,
            self._cannot_serve,
            # A scan that hangs may outlive its runner; the next one of the plugin waits for its end.
            thread=self._threads.setdefault(name, HostThread(self.blocked)),
            turn=self._turn,
        )

    def _provide_pods(self, settings: Settings, plugins: Plugins) -> None:
        """Raises `ConfigurationError` if a plugin needs the pods of the node and they cannot be read."""
        if self._pods is None and any(plugin.overrides("pod_allocator") for plugin in plugins.values()):
            if self._make_pods is None:
                raise ConfigurationError("a plugin needs the pods of the node, which this program does not read")
            self._pods = self._make_pods(settings)

    def _provide_dra(self, settings: Settings, plugins: Plugins) -> None:
        """Raises `ConfigurationError` if dynamic resource allocation is wanted and not possible."""
        names = _dra_families(settings, plugins)
        if names and self.dra is None:
            from accelplane.node.dra.node import NodeDra, node_access  # noqa: PLC0415 - memory of agents without DRA

            self.dra = NodeDra(
                runners=self.runners,
                allocations=self._allocations,
                blocked=self.blocked,
                watcher=self._watcher,
                changes=self.changes,
                access=self._make_node_access or (lambda: node_access(os.environ)),
            )
        if self.dra is not None:
            self.dra.check(settings, names, plugins)

    def _configure_dra(self) -> None:
        if self.dra is None or self._stop.is_set():
            return
        names = _dra_families(self.settings, self._plugins)
        for family in self.dra.configure(self.settings, names, self._plugins):
            name = family.units.name
            if name in self.runners:
                self.runners[name].context.units = family.units
            task = asyncio.create_task(self._supervise_service(f"DRA of {name}", family.run))
            self._dra_tasks.add(task)
            task.add_done_callback(self._dra_ended)

    def _dra_ended(self, task: asyncio.Task[None]) -> None:
        self._dra_tasks.discard(task)
        self._configure_dra()  # the plugin may have been enabled again

    def _start(self, name: str) -> None:
        self.runners[name] = self._runner(name)
        self._tasks[name] = asyncio.create_task(self._supervise_plugin(name))

    async def _end(self, name: str) -> None:
        await _end_tasks(self._tasks[name])
        del self._tasks[name], self.runners[name]
        self._crashed.discard(name)

    def _kubelet_directory_changed(self) -> None:
        for runner in self.runners.values():
            runner.publisher.directory_changed()
        if self.dra is not None:
            self.dra.directory_changed()

    def _hardware_changed(self) -> None:
        for runner in self.runners.values():
            runner.health.request()

    def _blocked_changed(self) -> None:
        for runner in self.runners.values():
            runner.request_check()

    def _cannot_serve(self, error: Exception) -> None:
        self._unservable = error
        if self._all_scanned():
            self._stop_if_nothing_is_served()

    async def _check_startup(self, _watcher: Watcher) -> None:
        # A runner may be ended or replaced before its first scan completes.
        while not self._all_scanned():
            await self.changes.wait()
        self._stop_if_nothing_is_served()

    def _all_scanned(self) -> bool:
        return all(runner.scan.completed.is_set() for runner in self.runners.values())

    def _stop_if_nothing_is_served(self) -> None:
        """Stops if no resource is served and one never can be. While others are served, it is only logged."""
        served = (served for runner in self.runners.values() for served in runner.publisher.served.values())
        if self._unservable is not None and all(each.task.done() for each in served):
            self._fatal = ConfigurationError(str(self._unservable))
            self._stop.set()

    async def _follow_config(self, _watcher: Watcher) -> None:
        if self._config_stamp() != self._config_read:
            self._config_changed.set()  # before the watch began
        while True:
            try:
                async with asyncio.timeout(self.settings.safety_interval):
                    await self._config_changed.wait()
                await asyncio.sleep(_CONFIG_DEBOUNCE)
            except TimeoutError:
                if self._config_stamp() == self._config_read:
                    continue
            self._config_changed.clear()
            stamp = self._config_stamp()
            if self._reload is None:
                return
            try:
                settings, plugins = self._reload()
                self._provide_pods(settings, plugins)
                self._provide_dra(settings, plugins)
            except ConfigurationError as error:
                if str(error) != self.config_problem:
                    self.config_problem = str(error)
                    log.error("new configuration rejected, the previous one stays active: %s", error)
            else:
                self.config_problem = ""
                await self._apply(settings, plugins)
            self._config_read = stamp  # not before: after an internal error the file is read again

    def _config_stamp(self) -> Stamp | None:
        """Changes with the file's content. For directories that cannot be watched, and files that are links."""
        return stamp_of(self._config_file or "", follow=True)

    async def _apply(self, settings: Settings, plugins: Plugins) -> None:
        old, self.settings, self._plugins = self._plugins, settings, dict(plugins)
        self._configure_dra()
        for name in old.keys() - plugins.keys():
            log.info("plugin %s is disabled", name)
            await self._end(name)
        for name, plugin in plugins.items():
            if name not in self.runners:
                log.info("plugin %s is enabled", name)
                self._start(name)
            elif self.runners[name].context.plugin.namespace != plugin.namespace:
                await self._end(name)
                self._start(name)
            elif name not in self._crashed:  # a crashed one is restarted with the new plugin and settings
                self.runners[name].context.pods = self._pods
                self.runners[name].reconfigure(plugin, settings)
        self.changes.notify_all()


def _dra_families(settings: Settings, plugins: Plugins) -> list[str]:
    """The plugins whose units may belong to dynamic resource allocation: by the settings, or since an earlier time."""
    apis, directory = settings.device_apis, settings.ownership_dir
    return [
        name
        for name, plugin in plugins.items()
        if apis.may_differ(name) or os.path.lexists(f"{directory}/{record_name(name, plugin)}.json")
    ]


async def _run(work: Coroutine[None, None, None]) -> BaseException | None:
    """Runs `work` in a separate task and returns its exception, also if `work` ends by a `CancelledError` of its own.

    The task has ended when this function is cancelled.

    A task group leaves the task in which it failed marked as cancelled (Python 3.11), so the caller must not run it.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await _end_tasks(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("crashed while the agent ended it", exc_info=error)
        raise
    return RuntimeError("its work was cancelled, but not by the agent") if task.cancelled() else task.exception()


async def _end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits for their end.

    No task is cancelled twice, also if this function is cancelled (as by `asyncio.gather`): that would interrupt the
    cleanup that the first cancellation has started.
    """
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def check_kubelet_directory(settings: Settings) -> None:
    """Raises `ConfigurationError` if no socket can ever be created in the kubelet's directory.

    A directory that does not exist is waited for: the kubelet creates it.
    """
    try:
        sockets.checked_path(f"{settings.sockets_dir}/{KUBELET_SOCKET}")
    except sockets.SocketPathError as error:
        raise ConfigurationError(str(error)) from error
    for directory in (settings.kubelet_dir, settings.sockets_dir):
        if not os.path.lexists(directory):
            log.warning("%s does not exist, waiting for the kubelet to create it", directory)
            return
        if not os.path.isdir(directory):
            raise ConfigurationError(f"-kubelet-dir: {directory}: not a directory, expected the kubelet's directory")
        if not os.access(directory, os.R_OK | os.X_OK):
            raise ConfigurationError(
                f"-kubelet-dir: {directory}: not readable by uid {os.geteuid()}; check its owner and mode"
            )
    if not os.access(settings.sockets_dir, os.W_OK):
        raise ConfigurationError(
            f"-kubelet-dir: {settings.sockets_dir}: not writable by uid {os.geteuid()}, expected a directory in which "
            "the agent can create sockets; check its owner and mode"
        )
