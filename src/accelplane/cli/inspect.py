"""`accelplane inspect`: the devices of this node, which of them are advertised, and which containers hold them.

The devices come from a separate scan, their health from the agents of the node, the holders from the kubelet: from its
pod-resources socket or, if there is none, from the device manager's checkpoint. Without an agent health is unknown.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from accelplane.cli import holdertimes, tables
from accelplane.cli.agentstatus import REGISTERED, AgentStates, health_of, read_states
from accelplane.cli.claimeddevices import claimed_devices
from accelplane.cli.tables import UNKNOWN, Column, Document, Format, Row, Table
from accelplane.devices import Device, Skipped, Unit, natural, plain
from accelplane.host import Host
from accelplane.kubelet import checkpoint, podresources, sockets
from accelplane.node import config as configuration
from accelplane.node.config import Chosen
from accelplane.node.plugins import installed
from accelplane.node.scan_loop import try_scan
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import PluginStatus, ResourceStatus, ScanStatus
from accelplane.node.units import units_of
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.report.inventory import ReportedUnit

K = TypeVar("K")
Units = Mapping[tuple[str, str], Unit]  # by resource and ID

_MANY = 8
_KUBELET_NOTES = {
    "none": "No kubelet answers under {}: holders of devices are not known.",
    "checkpoint": "From the checkpoint under {}: its pod-resources socket does not answer.",
}

_COLUMNS = (
    Column("RESOURCE"), Column("DEVICE"), Column("ADDRESS"), Column("NUMA"), Column("HEALTH", health=True),
    Column("ADVERTISED"), Column("HELD BY"), Column("UNIT", wide=True), Column("HOLDER SINCE", wide=True),
    Column("STATE SINCE", wide=True), Column("NODES", wide=True), Column("OWNER", wide=True),
    Column("MODEL", wide=True),
)  # fmt: skip
_SKIPPED_COLUMNS = (Column("PLUGIN"), Column("NOT PUBLISHED"), Column("WHY"))


class NodeAccess(msgspec.Struct, frozen=True):
    """A device node on the host: its path, mode in octal digits as for chmod(1), and the number of its group."""

    path: str
    mode: str
    gid: int


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device ID. `present` is whether the scan has found it. What is not known is None.

    `unit_id`, `model` and `unit_attributes` are of the unit of the ID, empty if the ID stands for several devices.
    `owner` is plugin, dra or none, empty if no agent with DRA answers. Times are RFC 3339 texts.
    """

    plugin: str
    resource: str
    id: str
    unit: str = ""
    health: str | None = None
    phase: str | None = None
    reason: str = ""
    numa: Sequence[int] | None = None
    attributes: Mapping[str, str | bool | int] = {}
    unit_id: str = ""
    model: str = ""
    unit_attributes: Mapping[str, str | bool | int] = {}
    present: bool = True
    advertised: bool | None = None
    owner: str = ""
    held_by: Sequence[str] | None = None
    held_since: str | None = None
    state_since: str | None = None
    nodes: Sequence[NodeAccess] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result; `source` is the source of the kubelet's part."""

    api_version: str = msgspec.field(default=tables.API_VERSION, name="apiVersion")
    kind: str = "NodeDeviceList"
    source: Literal["pod-resources", "checkpoint", "none"]
    devices: Sequence[DeviceRow]
    skipped: Mapping[str, Sequence[Skipped]]
    problems: Sequence[str]


class _Kubelet(msgspec.Struct, frozen=True):
    """The kubelet's part: advertised IDs (None: unknown), and containers by resource and ID, by CDI name, by claim."""

    source: Literal["pod-resources", "checkpoint", "none"]
    advertised: Mapping[str, frozenset[str]] | None = None
    holders: Mapping[tuple[str, str], Sequence[str]] = {}
    since: Mapping[tuple[str, str], float] = {}
    problem: str = ""
    claims: Mapping[str, Sequence[str]] = {}
    claim_holders: Sequence[podresources.ClaimHolder] = ()


def run(root: str, kubelet_dir: str, plugins: str, config: str, form: Format, *, agent: str = "") -> int:
    """Prints the result. Returns the exit code, 1 if something could not be read.

    `agent` is the address of an agent's pages or the path of its socket, in place of the sockets of all agents of the
    node. Raises `UsageError` and `OutputError`.
    """
    try:
        chosen = chosen_plugins(root, plugins, config)
    except ConfigurationError as error:
        print(f"accelplane inspect: {error}", file=sys.stderr)
        return 1
    settings = Settings(root=root, kubelet_dir=kubelet_dir)
    report = asyncio.run(_report(settings, chosen, agent, only_names=form.output == "name"))
    table = _table(report, form)
    report = msgspec.structs.replace(report, devices=[row.item for row in table.rows])
    match form.output:
        case "json" | "yaml":
            tables.emit(tables.format_content(report, form.output))
        case "name" | "csv":
            tables.emit(tables.write(Document([table]), form))
            tables.print_problems("accelplane inspect", report.problems)
        case "table" | "wide":
            tables.emit(_text(report, kubelet_dir, form, colors=tables.uses_colors()))
    return 1 if report.problems else 0


def chosen_plugins(root: str, plugins: str, config: str) -> Chosen:
    """The plugins of a comma-separated list, else of the agent's file `config`. Raises `ConfigurationError`.

    Nothing is logged from then on: the caller reports the problems.
    """
    logging.basicConfig(level=logging.CRITICAL, stream=sys.stderr, format="%(message)s")
    if not os.path.isdir(root):
        raise ConfigurationError(f"--root {root}: not a directory, expected one with sys/ and dev/ in it")
    named = [name.strip() for name in plugins.split(",") if name.strip()]
    options = configuration.read(config) if config else configuration.AgentConfig()
    source = "--plugins" if named else f"{config}: enabled"
    return configuration.choose(options, installed(named or options.enabled, source), config)


async def _report(settings: Settings, chosen: Chosen, agent: str, *, only_names: bool) -> Report:
    """`only_names`: what is not known about health and holders is no problem."""
    kubelet = await _ask_kubelet(settings)
    scans = [await _scan(name, plugin, settings.root) for name, plugin in chosen.plugins.items()]
    problems = [each.text for each in chosen.skipped]
    problems += [f"{plugin.name}: {plugin.scan.problem}" for plugin, _units in scans if plugin.scan.failing]
    states = await read_states(settings, agent)
    rows = [row for plugin, units in scans for row in _rows(plugin, units, kubelet, states, settings.root)]
    if not only_names:
        problems += [*states.problems, *states.missing([row.plugin for row in rows])]
        if rows and kubelet.source == "none" and not kubelet.problem:
            problems.insert(0, _KUBELET_NOTES["none"].format(settings.kubelet_dir))
    return Report(
        source=kubelet.source,
        devices=rows,
        skipped={plugin.name: plugin.skipped for plugin, _units in scans},
        # The agent may report the same problems as this scan.
        problems=list(dict.fromkeys([kubelet.problem, *problems] if kubelet.problem else problems)),
    )


async def _scan(name: str, plugin: Plugin[Config], root: str) -> tuple[PluginStatus, Units]:
    """The status of a plugin after one scan, and the units of its devices."""
    inventory, problem = await try_scan(plugin, root)
    units = {
        (resource, id_): unit
        for unit in units_of(Host(root), inventory)
        for resource, ids in unit.ids.items()
        for id_ in ids
    }
    status = PluginStatus(
        name=name,
        namespace=plugin.namespace,
        scan=ScanStatus(completed=True, failing=bool(problem), problem=problem, count=1),
        resources={
            resource: ResourceStatus(name=f"{plugin.namespace}/{resource}", devices=devices)
            for resource, devices in inventory.resources.items()
        },
        skipped=inventory.skipped,
    )
    return status, units


def _rows(plugin: PluginStatus, units: Units, kubelet: _Kubelet, states: AgentStates, root: str) -> Iterator[DeviceRow]:
    """The devices that the scan has found, or that the kubelet or an agent knows."""
    prefix = f"{plugin.namespace}/"
    devices = {
        (resource.name, id_): device
        for resource in plugin.resources.values()
        for id_, device in resource.devices.items()
    }
    known_ids = {key for key in (*kubelet.holders, *states.unit_names) if key[0].startswith(prefix)}
    known_ids.update(
        (resource, id_)
        for resource, ids in (kubelet.advertised or {}).items()
        if resource.startswith(prefix)
        for id_ in ids
    )
    cdi_names = frozenset(device.cdi.qualified_name for device in devices.values() if device.cdi is not None)
    claimed, unknown = _claimed_units(kubelet, plugin.namespace, units, cdi_names)
    for resource, id_ in sorted(devices.keys() | known_ids, key=lambda key: (natural(key[0]), natural(key[1]))):
        device = devices.get((resource, id_))
        unit = units.get((resource.removeprefix(prefix), id_))
        name = device.unit if device else states.unit_names.get((resource, id_), "")
        reported = states.units.get((plugin.name, name))
        held_by = None if kubelet.source == "none" else kubelet.holders.get((resource, id_), ())
        if held_by is not None and device is not None and device.cdi is not None:
            held_by = (*held_by, *kubelet.claims.get(device.cdi.qualified_name, ()))
        if held_by is not None and unit is not None:
            held_by = (*held_by, *claimed.get(unit.id, ()))
        # The scan alone knows some reasons for bad health, but never that a device is healthy.
        found_unhealthy = device is not None and not device.healthy
        topology = device.topology if device else None
        yield DeviceRow(
            plugin=plugin.name,
            resource=resource,
            id=id_,
            unit=name,
            health=health_of(reported) or ("Unhealthy" if found_unhealthy else None),
            phase=reported.phase if reported is not None and reported.known else None,
            reason=reported.text if reported is not None else device.reason if device is not None else "",
            numa=topology if isinstance(topology, tuple) else None,
            attributes=plain(device.attributes) if device else {},
            unit_id=unit.id if unit else "",
            model=unit.text("model") if unit else "",
            unit_attributes=plain(unit.attributes) if unit else {},
            present=device is not None,
            advertised=(reported is not None and reported.published)
            or _advertised(plugin.name, (resource, id_), kubelet, states),
            owner=reported.owner if reported is not None else "",
            held_by=held_by,
            held_since=tables.time_text(kubelet.since.get((resource, id_)) if held_by else None),
            state_since=tables.time_text(reported.since if reported is not None and reported.since else None),
            nodes=tuple(_access(device, root)) if device else (),
        )
    for device_name, held_by in sorted(unknown.items()):
        name = states.unit_names.get((plugin.namespace, device_name), "")
        yield _claimed_row(plugin, device_name, held_by, states.units.get((plugin.name, name)))


def _claimed_row(plugin: PluginStatus, device: str, held_by: Sequence[str], unit: ReportedUnit | None) -> DeviceRow:
    """A device that a claim holds and the scan does not find: it was removed, or is bound to VFIO for the claim."""
    return DeviceRow(
        plugin=plugin.name,
        resource=plugin.namespace,
        id=device,
        unit=unit.unit if unit is not None else "",
        health=health_of(unit),
        phase=unit.phase if unit is not None else None,
        reason=unit.text if unit is not None else "",
        unit_attributes={"pciAddress": unit.bdf} if unit is not None and unit.bdf else {},
        present=unit is None or unit.reason != "gone",
        advertised=unit.published if unit is not None else None,
        owner=unit.owner if unit is not None else "",
        held_by=held_by,
    )


def _claimed_units(
    kubelet: _Kubelet, driver: str, units: Units, cdi_names: frozenset[str]
) -> tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]:
    """The containers that have devices by claims of a driver: by unit ID, and by name of devices without a unit.

    Devices with one of the CDI names are those of a device ID.
    """
    devices = claimed_devices(kubelet.claim_holders, driver, {unit.id: unit for unit in units.values()}.values())
    found: list[tuple[str, str]] = []
    unknown: list[tuple[str, str]] = []
    for one in kubelet.claim_holders:
        holder = f"{one.namespace}/{one.pod}/{one.container} (DRA)"
        if (unit := devices.get((one.driver, one.pool, one.device))) is not None:
            found.append((unit.id, holder))
        elif one.driver == driver and cdi_names.isdisjoint(one.cdi_names):
            unknown.append((one.device, holder))
    return _group_by_key(found), _group_by_key(unknown)


def _advertised(plugin: str, key: tuple[str, str], kubelet: _Kubelet, states: AgentStates) -> bool | None:
    """Whether the kubelet lists an ID: by the agent of the plugin, else by the kubelet's answer."""
    resource, id_ = key
    if plugin in states.plugins and resource in states.resources:
        listed = not states.unit_names or key in states.unit_names
        return listed and states.resources[resource].stage == REGISTERED
    if kubelet.advertised is None:
        return None
    return id_ in kubelet.advertised.get(resource, ())


def _access(device: Device, root: str) -> Iterator[NodeAccess]:
    """The device's nodes that exist, with what decides whether other users than root can open them."""
    nodes = device.nodes or (device.cdi.nodes if device.cdi else ())
    for path in sorted({node.host_path for node in nodes}, key=natural):
        with contextlib.suppress(OSError):
            found = os.stat(root.rstrip("/") + path)
            yield NodeAccess(path, f"{stat.S_IMODE(found.st_mode):04o}", found.st_gid)


async def _ask_kubelet(settings: Settings) -> _Kubelet:
    problems: list[str] = []
    answer = None
    if sockets.identity(settings.pod_resources_socket) is not None:
        try:
            answer = await _from_pod_resources(settings.pod_resources_socket)
        except podresources.PodResourcesError as error:
            problems.append(str(error))
    recorded, since = None, dict[tuple[str, str], float]()
    try:
        # After the answer: the checkpoint then has the pods that the answer names.
        recorded = checkpoint.read_checkpoint(settings.sockets_dir)
    except checkpoint.CheckpointError as error:
        problems.append(str(error))
    if recorded is not None:
        since = holdertimes.held_since(settings.kubelet_dir, recorded.holdings)
    if answer is not None:
        # Without a readable checkpoint the times are unknown, which is not a problem.
        return msgspec.structs.replace(answer, since=since)
    problem = "; ".join(problems)
    if recorded is None:
        return _Kubelet("none", problem=problem)
    return _Kubelet(
        "checkpoint",
        {resource: frozenset(ids) for resource, ids in recorded.registered.items()},
        _group_by_key(
            ((one.resource, id_), f"pod uid {one.pod_uid}/{one.container}")
            for one in recorded.holdings
            for id_ in one.ids
        ),
        since,
        problem,
    )


async def _from_pod_resources(socket: str) -> _Kubelet:
    """The kubelet's answer, without times. Raises `PodResourcesError`."""
    kubelet = podresources.PodResources(socket)
    holders, claims = await kubelet.list_holders()
    advertised = await kubelet.allocatable()
    return _Kubelet(
        "pod-resources",
        {resource: frozenset(ids) for resource, ids in advertised.items()},
        _group_by_key(
            ((one.resource, id_), f"{one.namespace}/{one.pod}/{one.container}")
            for one in holders
            for id_ in one.device_ids
        ),
        claims=_group_by_key(
            (name, f"{one.namespace}/{one.pod}/{one.container} (DRA)") for one in claims for name in one.cdi_names
        ),
        claim_holders=claims,
    )


def _group_by_key(held: Iterable[tuple[K, str]]) -> dict[K, Sequence[str]]:
    """The containers by what they hold, sorted."""
    holders: dict[K, list[str]] = {}
    for key, holder in held:
        holders.setdefault(key, []).append(holder)
    return {key: tuple(sorted(names)) for key, names in holders.items()}


def _fold_rows(rows: Sequence[DeviceRow]) -> Iterator[tuple[DeviceRow, str]]:
    """The rows with the names to show: one row for many free devices in sequence that differ by their IDs only."""
    for row, alike in itertools.groupby(
        rows, lambda row: msgspec.structs.replace(row, id="", unit="", unit_id="", unit_attributes={}, nodes=())
    ):
        devices = list(alike)
        if row.held_by or len(devices) < _MANY:
            yield from ((device, device.id) for device in devices)
        else:
            yield devices[0], f"{devices[0].id} … {devices[-1].id} ({len(devices)})"


def _table(report: Report, form: Format) -> Table[DeviceRow]:
    """The devices in the order of the chosen column. Raises `UsageError`."""
    rows = [Row(f"{row.resource}/{row.id}", _cells(row, row.id), row) for row in report.devices]
    return tables.sort_tables([Table("devices", _COLUMNS, rows)], form.sort_by)[0]


def _cells(row: DeviceRow, shown: str) -> Sequence[str]:
    health = (row.health or "?") if row.present else "gone"
    return (
        row.resource,
        shown,
        str(row.attributes.get("bdf") or row.unit_attributes.get("pciAddress") or UNKNOWN),
        ",".join(map(str, row.numa)) if row.numa else UNKNOWN,
        f"{health} ({row.reason})" if row.reason else health,
        {None: "?", True: "yes", False: "no"}[row.advertised],
        "?" if row.held_by is None else ", ".join(row.held_by) or UNKNOWN,
        row.unit or UNKNOWN,
        row.held_since or UNKNOWN,
        row.state_since or UNKNOWN,
        ", ".join(f"{node.path} {node.mode} group {node.gid}" for node in row.nodes) or UNKNOWN,
        row.owner or UNKNOWN,
        row.model or UNKNOWN,
    )


def _text(report: Report, kubelet_dir: str, form: Format, *, colors: bool) -> str:
    """The output of a person: devices, hardware that is not published, and notes."""
    rows = [Row("", _cells(row, shown), row) for row, shown in _fold_rows(report.devices)]
    devices = Table("devices", _COLUMNS, rows, empty="No devices found.")
    parts = [tables.write(Document([devices]), Format(output=form.output, headers=form.headers), colors=colors)]
    if form.headers:
        skipped = [
            Row("", (name, skip.subject, skip.reason), skip) for name, skips in report.skipped.items() for skip in skips
        ]
        parts.append(tables.write(Document([Table("skipped", _SKIPPED_COLUMNS, skipped)]), Format()))
        if report.source == "checkpoint":
            parts.append(f"{tables.printable(_KUBELET_NOTES[report.source].format(kubelet_dir))}\n")
    text = "\n".join(part for part in parts if part)
    problems = [tables.printable(problem) for problem in report.problems]
    return text + "".join(f"{tables.color(line, good=False) if colors else line}\n" for line in problems)
