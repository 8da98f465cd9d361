"""The agent: one process that runs any set of plugins against one kubelet.

It owns what the plugins share (the watcher, the kubelet's directory, configuration, pages) and keeps them apart: a
plugin in trouble is logged and reported as not ready, the others go on.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence

from msgspec.structs import replace

from accelplane import __version__
from accelplane.kubelet import sockets
from accelplane.kubelet.server import KUBELET_SOCKET
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import (
    NodeStatus,
    PluginStatus,
    ResourceCounters,
    ResourceStatus,
    ScanStatus,
    UnitHealth,
)
from accelplane.node.watch import Watcher
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

Plugins = Mapping[str, Plugin[Config]]

# Work beside the plugins, for as long as the agent runs.
Companion = Callable[[Watcher], Coroutine[None, None, None]]

_CONFIG_SETTLES = 0.1
_RESTART_AFTER = 10.0


class Agent:
    """Runs `plugins` until `stop` is called.

    `reload`, called when something in `config_file`'s directory changes, returns the settings and plugins that are to
    run from then on; it raises `ConfigurationError` to refuse. `companions` run beside the plugins, by name.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: Plugins,
        *,
        config_file: str | None = None,
        reload: Callable[[], tuple[Settings, Plugins]] | None = None,
        companions: Mapping[str, Companion] | None = None,
    ) -> None:
        self.settings = settings
        self.runners: dict[str, PluginRunner] = {}
        self.config_problem = ""
        self._plugins = plugins
        self._config_file = os.path.abspath(config_file) if config_file is not None else None
        self._reload = reload
        self._companions = companions or {}
        self._watcher = Watcher()
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._fatal: Exception | None = None
        self._unservable: Exception | None = None
        self._config_changed = asyncio.Event()
        self._config_read = self._config_stamp()

    def status(self) -> NodeStatus:
        """The current state of all plugins."""
        return NodeStatus(
            version=__version__,
            root=self.settings.root,
            kubelet_dir=self.settings.kubelet_dir,
            config_problem=self.config_problem,
            plugins={
                name: plugin_status(runner, crashed=self._tasks[name].done()) for name, runner in self.runners.items()
            },
        )

    def stop(self) -> None:
        """Ends `run`: own sockets are removed, the kubelet sees every stream end."""
        self._stop.set()

    async def run(self) -> None:
        """Raises `ConfigurationError` when nothing can ever be served with these settings."""
        check_kubelet_directory(self.settings)
        log.info(
            "accelplane %s: plugins %s, root %s, kubelet %s",
            __version__, ", ".join(self._plugins) or "none", self.settings.root, self.settings.kubelet_dir,
        )  # fmt: skip
        self._watcher.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self.settings.http_address:
                    # Imported on demand, for the memory of agents without pages.
                    from accelplane.node.measurements import Measurements  # noqa: PLC0415
                    from accelplane.node.pages import serving  # noqa: PLC0415

                    measurements = Measurements(
                        lambda: {name: (runner.plugin, runner.inventory) for name, runner in self.runners.items()},
                        self.settings.root,
                    )
                    stack.push_async_callback(measurements.close)
                    await stack.enter_async_context(serving(self.settings.http_address, self.status, measurements.take))
                self._watcher.directories("kubelet", (self.settings.sockets_dir,), self._kubelet_directory_changed)
                companions = [asyncio.create_task(self._accompany(*each)) for each in self._companions.items()]
                stack.push_async_callback(_end_tasks, companions)
                for name, plugin in self._plugins.items():
                    self._start(name, plugin)
                stack.push_async_callback(self._end_all)
                tasks = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._judge_first_looks())]
                if self._config_file is not None:
                    directory = os.path.dirname(self._config_file)
                    self._watcher.directories("config", (directory,), self._config_changed.set, written=True)
                    tasks.append(asyncio.create_task(self._follow_config()))
                await tasks[0]
                for task in (*tasks, *companions):
                    task.cancel()
        finally:
            self._watcher.close()
        if self._fatal is not None:
            raise self._fatal

    async def _accompany(self, name: str, companion: Companion) -> None:
        while True:
            try:
                await companion(self._watcher)
            except Exception:
                log.exception("%s ended by a fault of this program, starting it again in %g s", name, _RESTART_AFTER)
            await asyncio.sleep(_RESTART_AFTER)

    def _start(self, name: str, plugin: Plugin[Config]) -> None:
        runner = self.runners[name] = PluginRunner(
            name, plugin, self.settings, self._watcher, self._cannot_serve, turn=self._turn
        )
        task = self._tasks[name] = asyncio.create_task(runner.run())
        task.add_done_callback(lambda task: self._runner_ended(name, task))

    async def _end(self, name: str) -> None:
        task = self._tasks[name]
        # A second cancellation would cut short what the first one began, and sockets would stay.
        if not task.cancelling():
            task.cancel()
        await asyncio.wait((task,))
        del self._tasks[name], self.runners[name]

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(name) for name in list(self._tasks)))

    def _runner_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stop.is_set():
            return
        log.error(
            "plugin %s ended by a fault of this program, starting it again in %g s",
            name, _RESTART_AFTER, exc_info=task.exception(),
        )  # fmt: skip
        asyncio.get_running_loop().call_later(_RESTART_AFTER, self._restart, name)

    def _restart(self, name: str) -> None:
        if name in self._tasks and self._tasks[name].done() and not self._stop.is_set():
            self._start(name, self.runners[name].plugin)

    def _kubelet_directory_changed(self) -> None:
        for runner in self.runners.values():
            runner.publisher.directory_changed()

    def _cannot_serve(self, error: Exception) -> None:
        self._unservable = error
        if all(runner.looked.is_set() for runner in self.runners.values()):
            self._give_up_if_nothing_is_served()

    async def _judge_first_looks(self) -> None:
        for runner in list(self.runners.values()):
            await runner.looked.wait()
        self._give_up_if_nothing_is_served()

    def _give_up_if_nothing_is_served(self) -> None:
        """One resource that cannot be served is its own trouble; when it is all there is, the agent is of no use."""
        alive = any(
            not served.task.done() for runner in self.runners.values() for served in runner.publisher.served.values()
        )
        if self._unservable is not None and not alive:
            self._fatal = ConfigurationError(str(self._unservable))
            self._stop.set()

    async def _follow_config(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.settings.safety_interval):
                    await self._config_changed.wait()
                await asyncio.sleep(_CONFIG_SETTLES)
            except TimeoutError:
                if self._config_stamp() == self._config_read:
                    continue
            self._config_changed.clear()
            self._config_read = self._config_stamp()
            if self._reload is None:
                return
            try:
                settings, plugins = self._reload()
            except ConfigurationError as error:
                if str(error) != self.config_problem:
                    self.config_problem = str(error)
                    log.error("new configuration refused, the old one stays in force: %s", error)
                continue
            self.config_problem = ""
            await self._apply(settings, plugins)

    def _config_stamp(self) -> tuple[int, int, int] | None:
        """Tells the file's content from a later one, for when its directory cannot be watched or it is a link."""
        try:
            status = os.stat(self._config_file or "")
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    async def _apply(self, settings: Settings, plugins: Plugins) -> None:
        self.settings = settings
        for name in self.runners.keys() - plugins.keys():
            log.info("plugin %s is not enabled any more", name)
            await self._end(name)
        for name, plugin in plugins.items():
            runner = self.runners.get(name)
            if runner is None:
                log.info("plugin %s is enabled now", name)
                self._start(name, plugin)
            elif runner.plugin.namespace != plugin.namespace:
                await self._end(name)
                self._start(name, plugin)
            else:
                runner.reconfigure(plugin, settings)


def plugin_status(runner: PluginRunner, *, crashed: bool) -> PluginStatus:
    """The current state of one plugin."""
    resources: dict[str, ResourceStatus] = {}
    for name, served in runner.publisher.served.items():
        server, counters = served.server, served.server.counters
        resources[name] = ResourceStatus(
            name=server.resource,
            stage=server.stage,
            problem=server.problem,
            devices=runner.publisher.inventory.resources.get(name, {}),
            counters=ResourceCounters(
                registrations=counters.registrations,
                registration_failures=dict(counters.registration_failures),
                lists_sent=counters.lists_sent,
                last_list_time=counters.last_list_time,
                allocations=counters.allocations,
                allocation_failures=counters.allocation_failures,
                allocation_buckets=tuple(map(int, counters.allocation_seconds)),
                allocation_seconds_sum=counters.allocation_seconds_sum,
            ),
        )
    return PluginStatus(
        name=runner.name,
        namespace=runner.plugin.namespace,
        crashed=crashed,
        scan=ScanStatus(
            completed=runner.looked.is_set(),
            failing=runner.blind,
            problem=runner.problem,
            count=runner.scans,
            failures=runner.scan_failures,
            seconds=runner.scan_seconds,
        ),
        resources=resources,
        health={
            unit: UnitHealth(phase=state.phase, reason=state.reason, unknown=runner.health.unknown.get(unit, ""))
            for unit, state in runner.health.states.items()
        },
        skipped=tuple(runner.inventory.skipped),
        cdi_writes=runner.cdi.writes,
        cdi_write_failures=runner.cdi.write_failures,
    )


async def _end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        # A second cancellation would cut short what the first one began.
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check_kubelet_directory(settings: Settings) -> None:
    """Raises `ConfigurationError` for a directory in which no socket could ever be made.

    One that does not exist is awaited: the kubelet makes it.
    """
    try:
        sockets.checked_path(f"{settings.sockets_dir}/{KUBELET_SOCKET}")
    except sockets.SocketPathError as error:
        raise ConfigurationError(str(error)) from error
    for directory in (settings.kubelet_dir, settings.sockets_dir):
        if not os.path.lexists(directory):
            log.warning("%s does not exist, waiting for the kubelet to make it", directory)
            return
        if not os.path.isdir(directory):
            raise ConfigurationError(f"{directory}: not a directory, expected the kubelet's (see --kubelet-dir)")
        if not os.access(directory, os.R_OK | os.X_OK):
            raise ConfigurationError(f"{directory}: not readable by uid {os.geteuid()}, expected the kubelet's sockets")
    if not os.access(settings.sockets_dir, os.W_OK):
        raise ConfigurationError(
            f"{settings.sockets_dir}: not writable by uid {os.geteuid()}; a plugin makes its sockets there"
        )


def with_overrides(settings: Settings, health_interval: float | None, scan_grace: float | None) -> Settings:
    """`settings` with the values that a configuration file gives."""
    if health_interval is not None:
        settings = replace(settings, health_interval=health_interval)
    if scan_grace is not None:
        settings = replace(settings, scan_grace=scan_grace)
    return settings
