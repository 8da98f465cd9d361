"""The families of device readings and of holders on the metrics page."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from accelplane.node.exposition import Family
from accelplane.node.holders import Holders, counts_by_unit
from accelplane.node.readings import NodeReadings
from accelplane.node.status import NodeStatus
from accelplane.readings import Family as ReadingFamily
from accelplane.readings.families import FAMILIES

_ORDER = {family: index for index, family in enumerate(FAMILIES)}


def hardware(readings: NodeReadings) -> Iterator[Family]:
    """The samples of all devices, families in the order of `FAMILIES`, those of other plugins after them."""
    lines: dict[ReadingFamily, list[str]] = {}
    for reading in readings.devices:
        for family, rendered in reading.lines.items():
            lines.setdefault(family, []).extend(rendered)
    for family in sorted(lines, key=lambda one: (_ORDER.get(one, len(_ORDER)), one.name)):
        made = Family(family.name, family.help, family.kind)
        made.add_lines(lines[family])
        yield made
    reads = Family("accelplane_reads_total", "Reads of device files, by outcome.", "counter")
    for plugin, counts in readings.outcomes.items():
        for outcome, count in sorted(counts.items()):
            reads.add(count, {"plugin": plugin, "outcome": outcome})
    yield reads


def holding(status: NodeStatus, holders: Holders, readings: NodeReadings, now: float) -> Iterator[Family]:
    """Which containers hold devices. Hardware samples have no labels of pods: pods come and go."""
    units, plugins = units_of(status)
    devices = {
        (plugin, unit): (plan.device, plan.bdf)
        for plugin, plans in readings.plans.items()
        for plan in plans
        for unit in plan.units
    }
    held = Family("accelplane_container_devices", "Device IDs that a container holds, by unit.")
    allocated = Family("accelplane_resource_allocated", "Device IDs that containers hold.")
    totals: dict[str, int] = dict.fromkeys(plugins, 0)
    for (namespace, pod, container, resource, unit), count in counts_by_unit(holders.rows, plugins, units).items():
        plugin = plugins[resource]
        device, bdf = devices.get((plugin, unit), ("", ""))
        totals[resource] += count
        held.add(
            count,
            {
                "namespace": namespace, "pod": pod, "container": container, "resource": resource,
                "plugin": plugin, "unit": unit, "device": device, "bdf": bdf,
            },
        )  # fmt: skip
    for resource, count in totals.items():
        allocated.add(count, {"resource": resource})
    yield held
    yield _since(holders, plugins)
    yield allocated
    yield _allocatable(holders, plugins)
    yield from _source(holders, now)


def request_counts(counts: Mapping[tuple[str, str], int]) -> Family:
    """Requests to the kubelet's pod-resources API."""
    family = Family("accelplane_kubelet_asks_total", "Requests to the pod-resources API of the kubelet.", "counter")
    for (method, outcome), count in sorted(counts.items()):
        family.add(count, {"method": method, "outcome": outcome})
    return family


def units_of(status: NodeStatus) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """The unit of each resource and ID, and the plugin of each resource."""
    units: dict[tuple[str, str], str] = {}
    plugins: dict[str, str] = {}
    for plugin in status.plugins.values():
        for resource in plugin.resources.values():
            plugins[resource.name] = plugin.name
            units.update({(resource.name, id_): device.unit for id_, device in resource.devices.items()})
    return units, plugins


def held_units(status: NodeStatus, holders: Holders) -> frozenset[tuple[str, str]]:
    """The plugin and unit of each device that a container holds."""
    units, plugins = units_of(status)
    return frozenset(
        (plugins[row.resource], units[row.resource, id_])
        for row in holders.rows
        for id_ in row.device_ids
        if (row.resource, id_) in units
    )


def _since(holders: Holders, resources: Collection[str]) -> Family:
    since = Family(
        "accelplane_container_held_since_timestamp_seconds", "When a container was first seen with device IDs."
    )
    for (namespace, pod, container, resource), seconds in holders.since.items():
        if resource in resources:
            labels = {"namespace": namespace, "pod": pod, "container": container, "resource": resource}
            since.add(seconds, labels)
    return since


def _allocatable(holders: Holders, resources: Collection[str]) -> Family:
    allocatable = Family("accelplane_resource_allocatable", "Device IDs that are allocatable for the kubelet.")
    for resource, count in holders.allocatable.items():
        if resource in resources:
            allocatable.add(count, {"resource": resource})
    return allocatable


def _source(holders: Holders, now: float) -> Sequence[Family]:
    source = Family("accelplane_holders_source", "1 for the source of the holders.")
    for name in ("podresources", "checkpoint", "none"):
        source.add(name == holders.source, {"source": name})
    age = Family("accelplane_holders_age_seconds", "Time since the holders were read.")
    if holders.source != "none":
        age.add(max(0.0, now - holders.began))
    return source, age


def with_samples(families: Iterable[Family]) -> list[Family]:
    """The families that have samples."""
    return [family for family in families if family.has_samples]
