"""The agent's state as one immutable value.

`Agent.status` makes a `NodeStatus`; metrics, pages, `accelplane inspect` and labels read that and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import Cause, Device, Phase, Skipped
from accelplane.kubelet.server import Stage
from accelplane.node.health_history import HealthChange, Recoveries


class UnitHealth(Struct, frozen=True, kw_only=True):
    """Health of one physical unit. `unknown` is why the last check had no answer, empty if it had one.

    `warning` is what the source says of a healthy unit, of the kind `warning_cause`; empty without a warning.

    `changes` are the last ones, oldest first. `unhealthy_seconds` is the time in phases other than healthy and suspect.
    """

    phase: Phase
    cause: Cause = "other"
    reason: str = ""
    unknown: str = ""
    warning: str = ""
    warning_cause: Cause = "other"
    changes: Sequence[HealthChange] = ()
    unhealthy_seconds: float = 0.0


class ResourceCounters(Struct, frozen=True, kw_only=True):
    """Counts since the resource's server started.

    `registration_failures` is keyed by gRPC status code. `last_list_time` is a Unix time in seconds, 0 before the first
    list. `allocation_buckets` has one count for each of `kubelet.server.LATENCY_BOUNDS` and one for longer calls;
    they are not cumulative. `preferred_buckets` are those of calls of GetPreferredAllocation.
    """

    registrations: int = 0
    registration_failures: Mapping[str, int] = {}
    lists_sent: int = 0
    last_list_time: float = 0.0
    allocations: int = 0
    allocation_failures: int = 0
    allocation_buckets: Sequence[int] = ()
    allocation_seconds_sum: float = 0.0
    allocation_outcomes: Mapping[str, int] = {}
    preferred_buckets: Sequence[int] = ()
    preferred_seconds_sum: float = 0.0


class ResourceStatus(Struct, frozen=True, kw_only=True):
    """One resource as listed to the kubelet. `name` is qualified, `devices` is keyed by device ID."""

    name: str
    stage: Stage = Stage.WAITING
    problem: str = ""
    devices: Mapping[str, Device] = {}
    counters: ResourceCounters = ResourceCounters()


class ScanStatus(Struct, frozen=True, kw_only=True):
    """The plugin's scans. `completed` is true after the first one; `seconds` is the duration of the last one."""

    completed: bool = False
    failing: bool = False
    problem: str = ""
    count: int = 0
    failures: int = 0
    seconds: float = 0.0


class PluginStatus(Struct, frozen=True, kw_only=True):
    """One plugin. `crashed` while it waits to be restarted after an internal error.

    `resources` is keyed by the resource's name without namespace, `health` by unit. `failures` counts the times that a
    unit became unhealthy, by cause. `problems` are those of its hooks, each with the name of the hook. `unlisted` are
    devices that dynamic resource allocation hands out.
    """

    name: str
    namespace: str
    crashed: bool = False
    scan: ScanStatus = ScanStatus()
    resources: Mapping[str, ResourceStatus] = {}
    health: Mapping[str, UnitHealth] = {}
    failures: Mapping[Cause, int] = {}
    recoveries: Recoveries = Recoveries()
    skipped: Sequence[Skipped] = ()
    problems: Sequence[str] = ()
    unlisted: Sequence[Device] = ()
    cdi_writes: int = 0
    cdi_write_failures: int = 0


class SkippedPlugin(Struct, frozen=True):
    """A plugin that does not run, with the reason: its class, its options, or the name of its entry point."""

    name: str
    reason: str

    @property
    def text(self) -> str:
        return f"plugin {self.name} is skipped: {self.reason}"


class DraUnit(Struct, frozen=True, kw_only=True):
    """A unit for dynamic resource allocation (DRA). `unit` is the name under which its health is stored.

    `owner` is plugin, dra, or none while the unit changes its owner. `devices` are the names of devices in claims,
    `claims` those that have it, as `namespace/name`. `held` of its `shares` belong to claims without admin access.
    `taints` are those in the ResourceSlices, as `key=value:effect`.
    """

    unit: str
    owner: str
    state: str = "healthy"
    text: str = ""
    published: bool = False
    taints: Sequence[str] = ()
    devices: Sequence[str] = ()
    claims: Sequence[str] = ()
    shares: int = 1
    held: int = 0

    @property
    def is_healthy(self) -> bool:
        """Whether it is offered to new claims."""
        return self.published and self.state in ("healthy", "degraded")


class DraStatus(Struct, frozen=True, kw_only=True):
    """The DRA driver of a plugin, or why it has none. `units` is keyed by the ID of the unit.

    `stage` is one of waiting, serving, registered and stopped. `publishing`: this process writes the slices.
    `limitations` are what the API server lacks. `events` are the last ones. The numbers count claims since the start.
    """

    driver: str = ""
    pool: str = ""
    stage: str = "waiting"
    publishing: bool = False
    problems: Sequence[str] = ()
    limitations: Sequence[str] = ()
    events: Sequence[str] = ()
    prepares: int = 0
    prepare_failures: int = 0
    unprepares: int = 0
    unprepare_failures: int = 0
    units: Mapping[str, DraUnit] = {}


class NodeStatus(Struct, frozen=True, kw_only=True):
    """The complete agent. `config_problem` is why the configuration file was rejected, empty if it is in effect.

    `uevents` counts the events of subsystems that plugins watch, and under "" the times that events were lost.
    `recoveries` counts recoveries from PCIe errors by PCI address and outcome, `wedged` the times that a driver
    declared the GPU at a PCI address wedged. `dra` is by plugin, of those whose units may belong to DRA.
    """

    version: str
    root: str
    kubelet_dir: str
    config_problem: str = ""
    plugins: Mapping[str, PluginStatus] = {}
    skipped_plugins: Sequence[SkippedPlugin] = ()
    uevents: Mapping[str, int] = {}
    recoveries: Mapping[tuple[str, str], int] = {}
    wedged: Mapping[str, int] = {}
    dra: Mapping[str, DraStatus] = {}

    @property
    def unhealthy(self) -> Iterator[str]:
        """Reasons why the process should be restarted."""
        for plugin in self.plugins.values():
            if plugin.crashed:
                yield f"plugin {plugin.name} crashed"

    @property
    def unready(self) -> Iterator[str]:
        """Reasons why not all devices of the node are advertised."""
        for skipped in self.skipped_plugins:
            if skipped.name not in self.plugins:
                yield skipped.text
        for plugin in self.plugins.values():
            if not plugin.scan.completed:
                yield f"{plugin.name}: first scan not done"
            if plugin.scan.failing:
                yield f"{plugin.name}: scan fails: {plugin.scan.problem}"
            for resource in plugin.resources.values():
                if resource.stage != Stage.REGISTERED:
                    yield f"{resource.name}: {resource.stage}: {resource.problem or 'not yet registered'}"
        for name, dra in self.dra.items():
            if dra.driver and dra.stage != "registered":
                yield f"{name}: DRA driver {dra.driver}: {dra.stage}: {'; '.join(dra.problems) or 'not yet registered'}"


def plugin_problems(status: NodeStatus) -> list[str]:
    """What an administrator should know of plugins: which ones are skipped, and problems of hooks and DRA drivers."""
    found = [each.text for each in status.skipped_plugins]
    for plugin in status.plugins.values():
        found += [f"{plugin.name}: {problem}" for problem in plugin.problems]
    for name, dra in status.dra.items():
        found += [f"{name}: {problem}" for problem in dra.problems]
    return found


def listed_devices(status: NodeStatus) -> dict[str, tuple[str, Mapping[str, Device]]]:
    """The plugin and the devices by ID of each resource, by the qualified name of the resource."""
    return {
        resource.name: (plugin.name, resource.devices)
        for plugin in status.plugins.values()
        for resource in plugin.resources.values()
    }


def units_by_claim(status: NodeStatus) -> dict[str | tuple[str, str, str], tuple[str, str]]:
    """The plugin and unit of each CDI device, and of each device of a driver by driver, pool and name."""
    claimed = {
        (dra.driver, dra.pool, device): (plugin, unit.unit)
        for plugin, dra in status.dra.items()
        for unit in dra.units.values()
        for device in unit.devices
    }
    return claimed | {
        device.cdi.qualified_name: (plugin.name, device.unit)
        for plugin in status.plugins.values()
        for resource in plugin.resources.values()
        for device in resource.devices.values()
        if device.cdi is not None
    }
