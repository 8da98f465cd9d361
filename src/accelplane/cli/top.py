"""`accelplane top`: current readings of the devices of this node, and the containers that hold them.

It scans and reads the node itself, and asks the kubelet for holders and the agents for states. Reading wakes no device
up, unless that is requested.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.cli.agentstatus import AgentStates, read_states
from accelplane.cli.claimeddevices import claimed_devices
from accelplane.cli.inspect import chosen_plugins
from accelplane.cli.refresh import show
from accelplane.cli.tables import UNKNOWN, Column, Document, Format, Row, Table, print_problems, sort_tables
from accelplane.devices import Device, Inventory
from accelplane.host import Host
from accelplane.kubelet import sockets
from accelplane.node.config import Chosen
from accelplane.node.scan_loop import try_scan
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.units import units_of
from accelplane.pages.current_values import device_values
from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.holders import HolderReader, Holders, claimed_units
from accelplane.pages.readings import Readings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.readings import DevicePlan
from accelplane.readings.use import Counters, Rates, Use, counters, rates, use_of
from accelplane.report.inventory import Holder, ReportedUnit

_RESCAN_INTERVAL = 30.0
_SECOND_READING = 1.0
_MANY = 8
_ASLEEP = "z"
_COLUMNS = (
    Column("PLUGIN"), Column("DEVICE"), Column("ADDRESS"), Column("STATE"), Column("BUSY", field="busy_percent"),
    Column("POWER", field="power_watts"), Column("LIMIT", field="power_limit_watts"),
    Column("TEMP", field="temperature_celsius"), Column("FREQ", field="frequency_hertz"),
    Column("LINK", field="link_transfers_per_second"), Column("HOLDER"), Column("UNITS", wide=True),
    Column("REASON", wide=True), Column("LANES", wide=True, field="link_lanes"),
)  # fmt: skip

Inventories = Mapping[str, tuple[Plugin[Config], Inventory]]
Found = dict[tuple[str, str], tuple[DevicePlan, Use]]  # by plugin and device


class DeviceRow(Struct, frozen=True, kw_only=True):
    """One device with its current values, None without a reading. `awake` is None without runtime power management.

    `state` is None if no agent, or none of its sources of health, knows it.
    """

    plugin: str
    device: str
    bdf: str
    units: Sequence[str]
    ids: int
    state: str | None
    reason: str
    awake: bool | None
    holders: Sequence[str]
    busy_percent: float | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    frequency_hertz: float | None
    link_transfers_per_second: float | None
    link_lanes: int | None


def run(
    root: str, kubelet_dir: str, plugins: str, config: str, form: Format,
    *, agent: str, interval: float, once: bool, wake: bool,
) -> int:  # fmt: skip
    """Prints the devices. Returns the exit code, 1 if something could not be read.

    Raises `UsageError` and `OutputError`.
    """
    sort_tables([Table[DeviceRow]("devices", _COLUMNS, ())], form.sort_by)
    try:
        chosen = chosen_plugins(root, plugins, config)
    except ConfigurationError as error:
        print(f"accelplane top: {error}", file=sys.stderr)
        return 1
    problems = asyncio.run(
        _show(
            Settings(root=root, kubelet_dir=kubelet_dir), chosen, form, agent, interval=interval, once=once, wake=wake
        )
    )
    return print_problems("accelplane top", problems)


async def _show(
    settings: Settings, chosen: Chosen, form: Format, agent: str,
    *, interval: float, once: bool, wake: bool,
) -> Sequence[str]:  # fmt: skip
    """Shows the devices until the end. Returns read errors."""
    node = _Node(settings, chosen, agent, wake=wake)

    async def read() -> tuple[Document[DeviceRow], Sequence[str]]:
        return await node.document(), node.problems()

    try:
        if once and await node.has_counters():
            await asyncio.sleep(_SECOND_READING)
        return await show(read, form, interval, once=once, program="accelplane top")
    finally:
        await node.close()


class _Node:
    """The readers of the node's devices. The owner calls `close` at the end."""

    def __init__(self, settings: Settings, chosen: Chosen, agent: str, *, wake: bool) -> None:
        self._agent = agent
        self._states = AgentStates()
        self._missing: Sequence[str] = ()
        self._settings = settings
        self._chosen = chosen
        self._inventories: dict[str, tuple[Plugin[Config], Inventory]] = {}
        self._scanned = float("-inf")
        self._scan_problems: dict[str, str] = {}
        self._denied: dict[str, set[str]] = {}
        self._stuck: set[str] = set()
        self._counters: dict[tuple[str, str], Counters] = {}
        self._rates: dict[tuple[str, str], Rates] = {}
        self._holders = HolderReader(settings, lambda: 0)
        self._readings = Readings(
            lambda: self._inventories,
            settings.root,
            held=lambda: frozenset(_holders_by_unit(self._inventories, self._holders.last, settings.root)),
            waking="always" if wake else "auto",
            min_interval=0.0,
        )

    async def document(self) -> Document[DeviceRow]:
        found = await self._read()
        holders = self._holders.last
        rows = [
            _table_row(row)
            for row in _rows(
                self._inventories,
                _holders_by_unit(self._inventories, holders, self._settings.root),
                found,
                self._states,
            )
        ]
        self._missing = self._states.missing([row.item.plugin for row in rows])
        problems = self.problems()
        table = Table("devices", _COLUMNS, rows, empty="" if problems else "No devices found.")
        return Document([table], {"source": holders.source, "problems": problems}, "DeviceUseList")

    async def has_counters(self) -> bool:
        """Reads once. Returns whether another reading gives rates."""
        await self._read()
        return any(each.idle or each.energy or each.busy is not None for each in self._counters.values())

    def problems(self) -> list[str]:
        found = [each.text for each in self._chosen.skipped]
        found += [f"{name}: {problem}" for name, problem in self._scan_problems.items()]
        for device, paths in sorted(self._denied.items()):
            others = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
            found.append(f"{device}: {min(paths)}{others}: permission denied; run as root")
        found += [f"{device}: a read blocks; the device is not read" for device in sorted(self._stuck)]
        socket = self._settings.pod_resources_socket
        if self._holders.last.source != "podresources" and sockets.identity(socket):
            found.append(f"{socket}: no answer of the kubelet; holders may be missing")
        # The agent may report the same problems.
        return list(dict.fromkeys([*found, *self._states.problems, *self._missing]))

    async def close(self) -> None:
        await asyncio.gather(self._readings.close(), self._holders.close())

    async def _read(self) -> Found:
        """The plan and the values of each device, by plugin and device."""
        if time.monotonic() - self._scanned >= _RESCAN_INTERVAL:
            await self._scan()
        self._states = await read_states(self._settings, self._agent)
        await self._holders.read()  # first: a device that a container holds may be read more often
        snapshot = await self._readings.take()
        now = time.monotonic()
        plans = {(name, plan.device): plan for name, plans in snapshot.plans.items() for plan in plans}
        found: Found = {}
        self._stuck.clear()
        for reading in snapshot.devices:
            plan = plans[reading.plugin, reading.device]
            values = self._values((reading.plugin, reading.device), reading, now)
            found[reading.plugin, reading.device] = plan, values
            if values.stuck:
                self._stuck.add(plan.device)
            if reading.denied:
                self._denied.setdefault(plan.device, set()).update(reading.denied)
        return found

    def _values(self, key: tuple[str, str], reading: DeviceReading, now: float) -> Use:
        """The values of a reading. Rates are those since the last reading that was not a repeated one."""
        found = device_values(reading)
        after = counters(found, now)
        before = self._counters.get(key)
        if before is None:
            self._counters[key] = after
        elif after.fresh or after.busy is not None:
            self._rates[key] = rates(before, after)
            self._counters[key] = after
        return use_of(found, self._rates.get(key, Rates()))

    async def _scan(self) -> None:
        self._scanned = time.monotonic()
        for name, plugin in self._chosen.plugins.items():
            inventory, problem = await try_scan(plugin, self._settings.root)
            if problem:
                self._scan_problems[name] = problem
            else:
                self._scan_problems.pop(name, None)
            self._inventories[name] = plugin, inventory


def _holders_by_unit(inventories: Inventories, holders: Holders, root: str) -> dict[tuple[str, str], list[str]]:
    """The names of the containers that hold IDs of a unit, by plugin and unit."""
    units = {
        (f"{plugin.namespace}/{resource}", id_): (name, device.unit)
        for name, (plugin, inventory) in inventories.items()
        for resource, devices in inventory.resources.items()
        for id_, device in devices.items()
    }
    found: dict[tuple[str, str], list[str]] = {}
    for holder in holders.rows:
        text = "/".join(part for part in (holder.namespace, holder.pod, holder.container) if part)
        keys = ((holder.resource, id_) for id_ in holder.device_ids)
        for key in dict.fromkeys(units[each] for each in keys if each in units):
            names = found.setdefault(key, [])
            if text not in names:
                names.append(text)
    by_cdi: dict[str | tuple[str, str, str], tuple[str, str]] = {
        device.cdi.qualified_name: (name, device.unit)
        for name, (_, inventory) in inventories.items()
        for device in inventory
        if device.cdi is not None
    }
    for name, (plugin, inventory) in inventories.items():
        if any(claim.driver == plugin.namespace for claim in holders.claims):
            claimed = claimed_devices(holders.claims, plugin.namespace, units_of(Host(root), inventory))
            by_cdi.update({key: (name, unit.health) for key, unit in claimed.items()})
    for key, place in claimed_units(holders.claims, by_cdi):
        found.setdefault(place, []).append(f"{'/'.join(key[:3])} (DRA)")
    return found


def _rows(
    inventories: Inventories, held: Mapping[tuple[str, str], list[str]], found: Found, states: AgentStates
) -> Iterator[DeviceRow]:
    """A row for each device of a plan, for the units that belong to none, and for those that only an agent knows."""
    for name, (_, inventory) in inventories.items():
        devices = [device for by_id in inventory.resources.values() for device in by_id.values()]
        planned: set[str] = set()
        for (plugin, _), (plan, values) in found.items():
            if plugin == name:
                planned.update(plan.units)
                members = [device for device in devices if device.unit in plan.units]
                yield _row(name, plan.device, plan.bdf, members, held, states=states, values=values)
        others: dict[tuple[str, str], list[Device]] = {}
        for device in devices:
            if device.unit not in planned:
                others.setdefault((device.resource, device.unit), []).append(device)
        yield from _other_rows(name, others, held, states)
        planned.update(device.unit for device in devices)
        for unit in states.units.values():
            if unit.plugin == name and unit.unit not in planned:
                holding = {(name, unit.unit): [_holder_text(each) for each in unit.holders]}
                yield _row(name, unit.unit, unit.bdf, (), holding, states=states, values=Use(), gone=unit)


def _holder_text(holder: Holder) -> str:
    container = "/".join((holder.namespace, holder.pod, holder.container))
    return f"{container} (DRA)" if holder.via == "dra" else container


def _other_rows(
    plugin: str, units: Mapping[tuple[str, str], list[Device]], held: Mapping[tuple[str, str], Sequence[str]],
    states: AgentStates,
) -> Iterator[DeviceRow]:  # fmt: skip
    """Rows of units without a plan: one for each, or one for a resource that has many."""
    resources: dict[str, list[str]] = {}
    for resource, unit in units:
        resources.setdefault(resource, []).append(unit)
    for resource, names in resources.items():
        groups = [names] if len(names) >= _MANY else [[name] for name in names]
        for group in groups:
            title = group[0] if len(group) == 1 else resource
            members = [device for name in group for device in units[resource, name]]
            bdf = members[0].text("bdf") if len(group) == 1 else ""
            yield _row(plugin, title, bdf, members, held, states=states, values=Use())


def _row(
    plugin: str, device: str, bdf: str, members: Sequence[Device], held: Mapping[tuple[str, str], Sequence[str]],
    *, states: AgentStates, values: Use, gone: ReportedUnit | None = None,
) -> DeviceRow:  # fmt: skip
    units = [gone.unit] if gone is not None else list(dict.fromkeys(member.unit for member in members))
    state, reason = _state(members, [states.units.get((plugin, unit)) for unit in units])
    return DeviceRow(
        plugin=plugin,
        device=device,
        bdf=bdf,
        units=units,
        ids=len(members),
        state="stuck" if values.stuck else state,
        reason=reason,
        awake=values.awake,
        holders=list(dict.fromkeys(name for unit in units for name in held.get((plugin, unit), ()))),
        busy_percent=None if values.busy is None else round(values.busy * 100, 1),
        power_watts=None if values.power is None else round(values.power, 2),
        power_limit_watts=values.limit,
        temperature_celsius=values.temperature,
        frequency_hertz=values.frequency,
        link_transfers_per_second=values.link_speed,
        link_lanes=values.link_lanes,
    )


def _state(members: Sequence[Device], units: Sequence[ReportedUnit | None]) -> tuple[str | None, str]:
    """The worst state of the units of a device by its agent, with the reason. A scan alone never finds it healthy."""
    if not units:
        return "not published", ""
    known = [unit for unit in units if unit is not None and unit.known]
    for phase in ("unhealthy", "recovering", "suspect"):
        for unit in known:
            if unit.phase == phase:
                return phase, unit.text
    unhealthy = next((member for member in members if not member.healthy), None)
    if unhealthy is not None:
        return "unhealthy", unhealthy.reason
    if len(known) < len(units):
        return None, next((unit.text for unit in units if unit is not None and not unit.known), "")
    return "healthy", next((unit.text for unit in known if unit.text), "")


def _table_row(row: DeviceRow) -> Row[DeviceRow]:
    missing = _ASLEEP if row.awake is False else UNKNOWN

    def format_value(value: float | None, text: str, scale: float = 1.0) -> str:
        return missing if value is None else text.format(value / scale)

    speed, lanes = row.link_transfers_per_second, row.link_lanes
    link = missing if speed is None else f"{speed / 1e9:g}GT/s" + ("" if lanes is None else f" x{lanes}")
    cells = (
        row.plugin,
        row.device,
        row.bdf or UNKNOWN,
        row.state or "?",
        format_value(row.busy_percent, "{:.0f}%"),
        format_value(row.power_watts, "{:.1f}W"),
        format_value(row.power_limit_watts, "{:g}W"),
        format_value(row.temperature_celsius, "{:.0f}C"),
        format_value(row.frequency_hertz, "{:.0f}MHz", 1e6),
        link,
        ", ".join(row.holders) or UNKNOWN,
        ", ".join(row.units) if len(row.units) < _MANY else str(len(row.units)),
        row.reason or UNKNOWN,
        missing if lanes is None else str(lanes),
    )
    return Row(f"{row.plugin}/{row.device}", cells, row)
