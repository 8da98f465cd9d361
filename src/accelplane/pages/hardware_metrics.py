"""The families of device readings and of holders on the metrics page."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from accelplane.node.hardware_events import OUTCOMES
from accelplane.node.hook_results import MAX_SAMPLES, OWN_PREFIXES
from accelplane.node.status import NodeStatus, listed_devices, units_by_claim
from accelplane.pages.device_reader import DeviceReading, Lines
from accelplane.pages.exposition import Family
from accelplane.pages.holders import Holders, Key, claimed_units, counts_by_unit
from accelplane.pages.readings import NodeReadings
from accelplane.readings import DevicePlan
from accelplane.readings import Family as ReadingFamily
from accelplane.readings.families import FAMILIES, GPU_WEDGED, INFO, PCI_RECOVERIES, UNIT_INFO
from accelplane.readings.values import labels

Dropped = Counter[tuple[str, str]]  # by plugin and cause

_UNIT = re.compile(r',unit="([^"\\]*)"')
_PLUGIN = re.compile(r'[{,]plugin="([^"\\]*)"')
_LABEL_PATTERN = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_SERIES = re.compile(rf"[^{{]+\{{({_LABEL_PATTERN}(?:,{_LABEL_PATTERN})*)\}}")
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"', re.ASCII)
_ORDER = {family: index for index, family in enumerate(FAMILIES)}


def hardware(
    readings: NodeReadings,
    status: NodeStatus | None = None,
    attached: Mapping[tuple[str, str], str] | None = None,
    dropped: Dropped | None = None,
) -> Iterator[Family]:
    """The samples of all devices, families in the order of `FAMILIES`, those of other projects after them.

    `attached` has labels of the container that alone holds a plugin's unit. `dropped` counts samples that are left out
    by plugin and cause.
    """
    lines: dict[ReadingFamily, list[str]] = defaultdict(list)
    found = [_attached(reading, attached) if attached else reading.lines for reading in readings.devices]
    for families, devices in itertools.groupby(found, key=tuple):  # the next devices often have the same families
        for family, rendered in zip(families, zip(*(device.values() for device in devices), strict=True), strict=True):
            lines[family] += itertools.chain.from_iterable(rendered)
    if status is not None:
        lines[UNIT_INFO] = [*_unit_info(readings, status)]
        for family, line in _events(status, readings.plans, attached or {}):
            lines[family].append(line)
    for family in sorted(lines.keys() & _ORDER.keys(), key=_ORDER.__getitem__):
        yield _rendered(family, lines[family])
    reads = Family("accelplane_reads_total", "Reads of device files, by outcome.", "counter")
    for plugin, counts in readings.outcomes.items():
        for outcome, count in sorted(counts.items()):
            reads.add(count, {"plugin": plugin, "outcome": outcome})
    yield reads
    if len(others := lines.keys() - _ORDER.keys()):
        yield from _of_others({family: lines[family] for family in others}, Counter() if dropped is None else dropped)


def _rendered(family: ReadingFamily, lines: Iterable[str]) -> Family:
    made = Family(family.name, family.help, family.kind)
    made.add_lines(lines)
    return made


def _of_others(lines: Mapping[ReadingFamily, Sequence[str]], dropped: Dropped) -> Iterator[Family]:
    """The families of other projects, without invalid samples and those above the limit of a plugin."""
    names: set[str] = set()
    totals: Counter[str] = Counter()
    for family in sorted(lines, key=lambda one: (one.name, one.help, one.kind)):
        start = len(f'{family.name}{{plugin="')  # the first label of each sample
        plugins = [line[start : line.index('"', start)] for line in lines[family]]
        counts = Counter(plugins)
        if family.name.startswith(OWN_PREFIXES) or family.name in names:
            dropped.update({(plugin, "invalid-name"): count for plugin, count in counts.items()})
            continue
        names.add(family.name)
        totals += counts
        above = {plugin for plugin in counts if totals[plugin] > MAX_SAMPLES}
        dropped.update({(plugin, "limit"): counts[plugin] for plugin in above})
        kept: list[str] = []
        for plugin, line in zip(plugins, lines[family], strict=True):
            if plugin not in above:
                if _is_valid(line.rpartition(" ")[0]):
                    kept.append(line)
                else:
                    dropped[plugin, "invalid-name"] += 1
        yield _rendered(family, kept)


def plugin_of(sample: str) -> str:
    """The plugin that a sample belongs to, empty if it names none."""
    found = _PLUGIN.search(sample)
    return found[1] if found else ""


@lru_cache(maxsize=4096)  # most series are on every page
def _is_valid(series: str) -> bool:
    """Whether the labels of a series are valid and distinct."""
    found = _SERIES.fullmatch(series)
    names = _LABEL.findall(found[1]) if found else ()
    return bool(names) and len(set(names)) == len(names)


def holding(
    status: NodeStatus, holders: Holders, readings: NodeReadings, now: float, prefix: str = ""
) -> Iterator[Family]:
    """Which containers hold devices. Hardware samples have no labels of pods: pods come and go.

    `prefix` is that of the labels namespace, pod and container.
    """
    listed = listed_devices(status)
    devices = {
        (plugin, unit): (plan.device, plan.bdf)
        for plugin, plans in readings.plans.items()
        for plan in plans
        for unit in plan.units
    }
    held = Family("accelplane_container_devices", "Device IDs that a container holds, by unit.")
    allocated = Family("accelplane_resource_allocated", "Device IDs that containers hold.")
    totals: dict[str, int] = dict.fromkeys(listed, 0)
    for (*names, resource), (plugin, unit), count, via in _holdings(status, holders):
        device, bdf = devices.get((plugin, unit), ("", ""))
        place = {"resource": resource, "plugin": plugin, "unit": unit, "device": device, "bdf": bdf}
        held.add(count, {**_container(prefix, *names), **place, **via})
        if not via:
            totals[resource] += count
    for resource, count in totals.items():
        allocated.add(count, {"resource": resource})
    description = "When a container got its device IDs, or was first seen with them."
    since = Family("accelplane_container_held_since_timestamp_seconds", description)
    for (*names, resource), seconds in holders.since.items():
        if resource in listed:
            since.add(seconds, {**_container(prefix, *names), "resource": resource})
    allocatable = Family("accelplane_resource_allocatable", "Device IDs that are allocatable for the kubelet.")
    for resource, count in holders.allocatable.items():
        if resource in listed:
            allocatable.add(count, {"resource": resource})
    yield from (held, since, allocated, allocatable, *_source(holders, now))


def request_counts(counts: Mapping[tuple[str, str], int]) -> Family:
    """Requests to the kubelet's pod-resources API."""
    family = Family("accelplane_kubelet_asks_total", "Requests to the pod-resources API of the kubelet.", "counter")
    for (method, outcome), count in sorted(counts.items()):
        family.add(count, {"method": method, "outcome": outcome})
    return family


def held_units(status: NodeStatus, holders: Holders) -> frozenset[tuple[str, str]]:
    """The plugin and unit of each device that a container holds."""
    return frozenset(place for _key, place, _count, _via in _holdings(status, holders) if place[1])


def exclusive_labels(status: NodeStatus, holders: Holders, prefix: str) -> Mapping[tuple[str, str], str]:
    """Rendered labels of the container that holds a plugin's unit, for units that exactly one container holds."""
    found: dict[tuple[str, str], set[tuple[str, str, str]]] = {}
    for (namespace, pod, container, _resource), place, _count, _via in _holdings(status, holders):
        if pod:
            found.setdefault(place, set()).add((namespace, pod, container))
    return {unit: labels(**_container(prefix, *next(iter(each)))) for unit, each in found.items() if len(each) == 1}


def idle(seconds: Mapping[tuple[str, str], float]) -> Family:
    """How long held units have not been used."""
    family = Family("accelplane_unit_idle_seconds", "Time since a unit that a container holds was used.")
    for (plugin, unit), value in seconds.items():
        family.add(round(value, 3), {"plugin": plugin, "unit": unit})
    return family


def _holdings(status: NodeStatus, holders: Holders) -> Iterator[tuple[Key, tuple[str, str], int, Mapping[str, str]]]:
    """What containers hold: the holder, plugin and unit (empty if not listed), the number of IDs, further labels.

    A claim has no resource of the kubelet: its driver stands for it, and no ID of a resource is allocated.
    """
    listed = listed_devices(status)
    for (key, unit), count in counts_by_unit(holders.rows, listed).items():
        yield key, (listed[key[3]][0], unit), count, {}
    if holders.claims:
        for (key, place), count in claimed_units(holders.claims, units_by_claim(status)).items():
            yield key, place, count, {"via": "dra"}


def _container(prefix: str, namespace: str, pod: str, container: str) -> dict[str, str]:
    return {f"{prefix}namespace": namespace, f"{prefix}pod": pod, f"{prefix}container": container}


def _attached(reading: DeviceReading, attached: Mapping[tuple[str, str], str]) -> Lines:
    """The lines with the labels of the container that alone holds their unit, or the device with all its units."""
    by_unit = {unit: attached.get((reading.plugin, unit), "") for unit in reading.units}
    whole = _common_label(by_unit.values())

    def extended(line: str) -> str:
        unit = _UNIT.search(line)
        extra = by_unit.get(unit[1], "") if unit is not None else whole
        head, _, value = line.rpartition("} ")
        return f"{head},{extra}}} {value}" if extra else line

    def extended_if_valid(line: str) -> str:
        """Other projects may have labels of these names."""
        found = extended(line)
        return found if _is_valid(found.rpartition(" ")[0]) else line

    return {
        family: rendered if family is INFO else [*map(extended if family in _ORDER else extended_if_valid, rendered)]
        for family, rendered in reading.lines.items()
    }


def _common_label(texts: Iterable[str]) -> str:
    """The labels of the units of a device if they are equal, else none."""
    distinct = set(texts)
    return distinct.pop() if len(distinct) == 1 else ""


def _unit_info(readings: NodeReadings, status: NodeStatus) -> Iterator[str]:
    """A sample for each resource of each unit.

    While the agent starts, units are known before their resources. A sample without a resource would be a new series.
    """
    resources: dict[tuple[str, str], dict[str, str]] = {}
    for resource, (plugin, devices) in listed_devices(status).items():
        label = f",{labels(resource=resource)}"
        for unit in {device.unit for device in devices.values()}:
            resources.setdefault((plugin, unit), {})[resource] = label
    for reading in readings.devices:
        bdf = f",{labels(bdf=reading.bdf)}" if reading.bdf else ""
        for unit in reading.units:
            text = labels(plugin=reading.plugin, unit=unit, device=reading.device)
            for resource in resources.get((reading.plugin, unit), {}).values():
                yield f"{UNIT_INFO.name}{{{text}{bdf}{resource}}} 1"


def _events(
    status: NodeStatus, plans: Mapping[str, Sequence[DevicePlan]], attached: Mapping[tuple[str, str], str]
) -> Iterator[tuple[ReadingFamily, str]]:
    """The counters of uevents, with 0 for devices without an event: `increase()` then has the first one."""
    for plugin, plan in ((plugin, plan) for plugin, found in plans.items() for plan in found if plan.bdf):
        device = labels(plugin=plugin, device=plan.device, bdf=plan.bdf)
        holder = _common_label(attached.get((plugin, unit), "") for unit in plan.units) if attached else ""
        extra = f",{holder}" if holder else ""
        for outcome in OUTCOMES:
            count = status.recoveries.get((plan.bdf, outcome), 0)
            yield PCI_RECOVERIES, f'{PCI_RECOVERIES.name}{{{device},outcome="{outcome}"{extra}}} {count}'
        if plugin == "gpu" or plan.bdf in status.wedged:
            yield GPU_WEDGED, f"{GPU_WEDGED.name}{{{device}{extra}}} {status.wedged.get(plan.bdf, 0)}"


def _source(holders: Holders, now: float) -> Sequence[Family]:
    source = Family("accelplane_holders_source", "1 for the source of the holders.")
    for name in ("podresources", "checkpoint", "none"):
        source.add(name == holders.source, {"source": name})
    age = Family("accelplane_holders_age_seconds", "Time since the holders were read.")
    if holders.source != "none":
        age.add(max(0.0, now - holders.began))
    stale = Family("accelplane_holders_stale_ids", "Device IDs that the kubelet lists for an ended pod as well.")
    if holders.source == "podresources":
        stale.add(holders.stale)
    return source, age, stale


def with_samples(families: Iterable[Family]) -> list[Family]:
    """The families that have samples."""
    return [family for family in families if len(family)]
