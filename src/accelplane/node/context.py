"""The objects that the tasks of one plugin share."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from accelplane.devices import Device, Inventory
from accelplane.host.isolation import BlockedDevices
from accelplane.node.advertised import Key
from accelplane.node.device_list import DeviceList
from accelplane.node.hardware_events import HardwareEvents
from accelplane.node.hook_problems import HookProblems
from accelplane.node.loop_watchdog import watched, watching
from accelplane.node.settings import Settings
from accelplane.plugins import Config, Plugin
from accelplane.plugins.base import NodePods, PodAllocator

log = logging.getLogger(__name__)

T = TypeVar("T")


class UnitOwners(Protocol):
    """Who hands out the units of a plugin, if some may belong to dynamic resource allocation."""

    async def observe(self, inventory: Inventory) -> None:
        """Makes the units of a scan, before its devices are listed. Errors are logged; the earlier units stay."""
        ...

    def withheld(self, inventory: Iterable[Device]) -> frozenset[Key]:
        """The IDs of the inventory that the kubelet's list must not have now."""
        ...

    def check_unclaimed(self, resource: str, ids: Iterable[str]) -> None:
        """Raises `AllocationError` if a claim holds the unit of one of the IDs."""
        ...


class PluginContext:
    """The plugin that runs under `name`, its settings and devices.

    Plugin and settings are replaced when the configuration changes.
    """

    def __init__(
        self,
        name: str,
        plugin: Plugin[Config],
        settings: Settings,
        pods: NodePods | None = None,
        *,
        changed: Callable[[], None] = lambda: None,
        events: HardwareEvents | None = None,
        blocked: BlockedDevices | None = None,
    ) -> None:
        """`pods` is needed by plugins that override `pod_allocator`. `events` and `blocked` are of all devices of the
        node.

        `changed` is called after changes of what pages show: devices, health, registration, allocations.
        """
        self.name = name
        self.devices = DeviceList()
        self.settings = settings
        self.changed = changed
        self.events = events or HardwareEvents()
        self.blocked = blocked or BlockedDevices()
        self.pods = pods
        self.problems = HookProblems(name, changed)
        self.units: UnitOwners | None = None
        self.use(plugin)

    async def call(self, hook: str, start: Callable[[], Awaitable[T]]) -> T:
        """The result of a hook of the plugin that runs in the event loop. As `loop_watchdog.watched`."""
        return await watched(self.name, hook, start, self.report_blocking)

    def report_blocking(self, problem: str) -> None:
        self.problems.update("event loop", [problem])

    def use(self, plugin: Plugin[Config]) -> None:
        self.plugin = plugin
        self.problems.clear()
        self.pod_allocator: PodAllocator | None = None
        if self.pods is not None and plugin.overrides("pod_allocator"):
            try:
                with watching(self.name, "pod_allocator", self.report_blocking):
                    self.pod_allocator = plugin.pod_allocator(self.pods)
            except Exception as error:
                log.exception("%s: pod_allocator failed; the other hooks allocate", self.name)
                self.problems.update("pod_allocator", [f"{type(error).__name__}: {error}"])
