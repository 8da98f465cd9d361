"""The content of `/api/v1/inventory`: devices, their holders and their health, within the limits of the document.

Everything here is a pure function of the agent's state. `report.inventory` has the types.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct, UnsetType
from msgspec.structs import replace

from accelplane.devices import Device, Phase
from accelplane.host.pci import pci_address
from accelplane.node.advertised import DEPARTED
from accelplane.node.status import (
    DraStatus,
    DraUnit,
    NodeStatus,
    PluginStatus,
    ResourceStatus,
    UnitHealth,
    listed_devices,
    plugin_problems,
    units_by_claim,
)
from accelplane.pages.holders import Holders, Key, claimed_units, counts_by_unit
from accelplane.readings import DevicePlan
from accelplane.report.inventory import (
    AdvertisedResource,
    Change,
    Holder,
    NodeInventory,
    PhaseName,
    PluginInventory,
    ReportedUnit,
    SkippedHardware,
)
from accelplane.report.limits import (
    MAX_BYTES,
    MAX_HOLDERS,
    MAX_NAME,
    MAX_PLUGINS,
    MAX_PROBLEMS,
    MAX_RESOURCES,
    MAX_SKIPPED,
    MAX_TEXT,
    MAX_UNIT_HOLDERS,
    MAX_UNITS,
)

# The number of history entries of each unit: fewer if the answer would be too large.
_HISTORIES = (32, 8, 1, 0)

# States of units for DRA that the health of the plugin does not have.
_DRA_STATES = ("unbound", "gone", "cleanup")

Source = Literal["podresources", "checkpoint", "none"]
Plans = Mapping[str, Sequence[DevicePlan]]
# By plugin and unit the Unix time since which the unit, which a container holds, has not been used.
IdleSince = Mapping[tuple[str, str], float]


class Facts(Struct, frozen=True, kw_only=True):
    """The input of an inventory."""

    status: NodeStatus
    holders: Holders
    plans: Plans = {}
    idle_since: IdleSince = {}


def inventory_plugins(facts: Facts) -> list[PluginInventory]:
    """All plugins within the limits of numbers and texts, but for those whose first scan is not complete.

    While an agent is replaced, readers have the devices of the old one until the new one has found them.
    """
    held = _held(facts)
    totals = Counter(row.resource for row in facts.holders.rows for _id in row.device_ids)
    places = {(plugin, unit): plan for plugin, plans in facts.plans.items() for plan in plans for unit in plan.units}
    room = MAX_UNITS
    plugins: list[PluginInventory] = []
    complete = (plugin for plugin in facts.status.plugins.values() if plugin.scan.completed)
    for plugin in itertools.islice(complete, MAX_PLUGINS):
        dra = facts.status.dra.get(plugin.name)
        claimable = _claimable_units(dra)
        units: list[ReportedUnit] = []
        listed = _units(plugin)
        offered = {each.unit: (id_, each) for id_, each in dra.units.items()} if dra is not None else {}
        unlisted = [name for name, (_, each) in offered.items() if each.claims and name not in listed]
        for name in [*listed, *unlisted][:room]:
            key = (plugin.name, name)
            unit = _unit(key, listed.get(name, ()), plugin.health.get(name), places.get(key), offered.get(name))
            if dra is not None and name in claimable:
                unit.ids[_name(dra.driver)] = sum(each.shares for each in claimable[name])
            idle_since = facts.idle_since.get(key, 0.0)
            units.append(replace(unit, holders=tuple(held.get(key, ())), idle_since=idle_since))
        room -= len(units)
        resources = [_resource(each, totals[each.name]) for each in plugin.resources.values()]
        if dra is not None and claimable:
            resources.insert(0, _driver(dra, [each for units in claimable.values() for each in units]))
        skipped = plugin.skipped[:MAX_SKIPPED]
        plugins.append(
            PluginInventory(
                _name(plugin.name),
                tuple(resources[:MAX_RESOURCES]),
                tuple(units),
                tuple(SkippedHardware(_name(plugin.name), _name(each.subject), _text(each.reason)) for each in skipped),
            )
        )
    return plugins


def document(plugins: Sequence[PluginInventory], identity: NodeInventory) -> bytes:
    """The JSON of the plugins and `identity`, at most `MAX_BYTES`: too large an inventory loses history, then units."""
    for length in _HISTORIES:
        plugins = [replace(each, units=tuple(_shorten(unit, length) for unit in each.units)) for each in plugins]
        encoded = msgspec.json.encode(replace(identity, plugins=tuple(plugins)))
        if len(encoded) <= MAX_BYTES:
            return encoded
    while True:
        plugins = [replace(each, units=each.units[: len(each.units) // 2]) for each in plugins]
        shown = tuple(plugins) if any(each.units for each in plugins) else ()
        encoded = msgspec.json.encode(replace(identity, plugins=shown))
        if len(encoded) <= MAX_BYTES:
            return encoded


def inventory_problems(status: NodeStatus) -> tuple[str, ...]:
    """The problems of plugins within the limits of numbers and texts."""
    return tuple(map(_text, plugin_problems(status)[:MAX_PROBLEMS]))


def state_of(plugins: Sequence[PluginInventory], source: Source, problems: Sequence[str] = ()) -> bytes:
    """Equal for equal inventories with holders of the same source, whatever their age."""
    return msgspec.json.encode((plugins, source, problems))


def _shorten(unit: ReportedUnit, length: int) -> ReportedUnit:
    excess = len(unit.history) - length
    return replace(unit, history=unit.history[excess:]) if excess > 0 else unit


def _resource(resource: ResourceStatus, allocated: int) -> AdvertisedResource:
    healthy = sum(device.healthy for device in resource.devices.values())
    return AdvertisedResource(
        _name(resource.name), resource.stage.value, _text(resource.problem), len(resource.devices), healthy, allocated
    )


def _driver(dra: DraStatus, units: Sequence[DraUnit]) -> AdvertisedResource:
    """The units for claims, as a resource with the name of the driver."""
    return AdvertisedResource(
        _name(dra.driver),
        dra.stage,
        _text("; ".join(dra.problems)),
        sum(unit.shares for unit in units),
        sum(unit.shares for unit in units if unit.is_healthy),
        sum(unit.held for unit in units),
    )


def _claimable_units(dra: DraStatus | None) -> Mapping[str, Sequence[DraUnit]]:
    """The units that belong to DRA or to a claim, by the name under which their health is stored."""
    found: dict[str, list[DraUnit]] = {}
    for unit in dra.units.values() if dra is not None else ():
        if unit.owner == "dra" or unit.held:
            found.setdefault(unit.unit, []).append(unit)
    return found


def _units(plugin: PluginStatus) -> dict[str, list[tuple[str, Device]]]:
    """The devices of each unit, each with its qualified resource, which is empty if the kubelet does not list it."""
    units: dict[str, list[tuple[str, Device]]] = {}
    for resource in plugin.resources.values():
        for device in resource.devices.values():
            units.setdefault(device.unit, []).append((resource.name, device))
    for device in plugin.unlisted:
        units.setdefault(device.unit, []).append(("", device))
    return units


def _unit(
    key: tuple[str, str],
    devices: Sequence[tuple[str, Device]],
    health: UnitHealth | None,
    plan: DevicePlan | None,
    dra: tuple[str, DraUnit] | None,
) -> ReportedUnit:
    """The unit without its holders, with its complete history."""
    phase, reason, text = _phase(health, [device for _, device in devices])
    id_, offered = dra or ("", DraUnit(unit="", owner=""))
    if offered.state in _DRA_STATES:
        phase, reason, text = Phase.UNHEALTHY.value, offered.state, offered.text
    changes = health.changes if health is not None else ()
    unknown = health.unknown if health is not None else ""
    return ReportedUnit(
        plugin=_name(key[0]),
        unit=_name(key[1]),
        device=_name(plan.device) if plan is not None else "",
        bdf=_name(plan.bdf) if plan is not None else pci_address(id_.partition("-")[0]) or "",
        model=_name(plan.facts.get("model", "")) if plan is not None else "",
        numa=_numa(devices[0][1]) if devices else None,
        phase=phase,
        known=not unknown,
        reason=reason,
        text=_text(text or unknown),
        since=changes[-1].time if changes and changes[-1].phase.value == phase else 0.0,
        owner=_name(offered.owner),
        published=offered.published,
        ids=dict(Counter(_name(resource) for resource, _device in devices if resource)),
        history=tuple(
            Change(each.time, each.phase.value, "" if each.phase is Phase.HEALTHY else each.cause, _text(each.reason))
            for each in changes
        ),
    )


def _phase(health: UnitHealth | None, devices: Sequence[Device]) -> tuple[PhaseName, str, str]:
    """Phase, kind of reason and reason of a unit: that of its health source, or of its devices as listed."""
    if health is not None and health.phase is not Phase.HEALTHY:
        return health.phase.value, health.cause, health.reason
    unhealthy = next((device for device in devices if not device.healthy), None)
    if unhealthy is None:
        if health is not None and health.warning:
            return Phase.HEALTHY.value, health.warning_cause, health.warning
        return Phase.HEALTHY.value, "", ""
    if unhealthy.reason == DEPARTED:
        return Phase.UNHEALTHY.value, "gone", unhealthy.reason
    cause = "scan" if unhealthy.reason.startswith("scan fails") else "other"
    return Phase.UNHEALTHY.value, cause, unhealthy.reason


def _numa(device: Device) -> int | None:
    """The NUMA node if there is exactly one."""
    nodes = () if isinstance(device.topology, UnsetType) else device.topology or ()
    return nodes[0] if len(nodes) == 1 and 0 <= nodes[0] <= 65_536 else None


def _held(facts: Facts) -> dict[tuple[str, str], list[Holder]]:
    """The holders of each plugin and unit. IDs that are not listed have no unit and are left out."""
    listed = listed_devices(facts.status)
    held: dict[tuple[str, str], list[Holder]] = {}
    room = MAX_HOLDERS

    def add(place: tuple[str, str], key: Key, count: int, via: Literal["", "dra"] = "") -> None:
        nonlocal room
        known = held.setdefault(place, [])
        if room > 0 and len(known) < MAX_UNIT_HOLDERS:
            room -= 1
            namespace, pod, container, resource = map(_name, key)
            since = facts.holders.since.get(key, 0.0)
            known.append(Holder(namespace, pod, container, resource, count, since, via))

    for (key, unit), count in counts_by_unit(facts.holders.rows, listed).items():
        if unit:
            add((listed[key[3]][0], unit), key, count)
    for (key, place), count in claimed_units(facts.holders.claims, units_by_claim(facts.status)).items():
        add(place, key, count, "dra")
    return held


def _clip(text: str, limit: int) -> str:
    """The text without lone surrogates, which JSON cannot hold."""
    return text[:limit] if text.isascii() else text[:limit].encode(errors="replace").decode()


_name = partial(_clip, limit=MAX_NAME)
_text = partial(_clip, limit=MAX_TEXT)
