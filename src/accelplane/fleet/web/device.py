"""One device: state, use, holders, current values, history, facts and next steps."""

import shlex
from collections.abc import Mapping, Sequence

from accelplane.report.inventory import Change, ReportedUnit
from accelplane.report.readings import DeviceReadings, Value

from ..model import Node
from .html import Element, element, keyed, live
from .node import holder_table, missing
from .page import Context, Page, badge, facts, grafana_link, node_link, section
from .query import Query
from .summaries import is_idle
from .table import Column, Table, moment, show
from .values import plot, si, unit_of

_MAX_ROWS = 200
_MAX_VALUES = 150
# Limits of the elements of each table. The page has at most 2,500.
_HOLDER_ELEMENTS = 850
_VALUE_ELEMENTS = 850
_OUTCOMES: Mapping[str, str] = {
    "missing": "not provided by the driver", "denied": "denied", "asleep": "asleep", "invalid": "not a valid value",
    "error": "read error", "timeout": "no answer in time",
}  # fmt: skip


def screen(context: Context, query: Query) -> Page:
    """The device of the query."""
    node = context.cluster.nodes.get(query.node)
    unit = next((u for u in node.units if (u.plugin, u.unit) == (query.plugin, query.unit)), None) if node else None
    title = f"Device {query.unit} on {query.node}"
    if node is None:
        return Page(title=title, content=(missing(query.node),), found=False)
    if unit is None:
        return Page(title=title, content=(_missing_device(node, query),), found=False)
    holders = holder_table(context, "device", "Containers with this device", "No container has it.")
    content = (
        _state(unit),
        _use(context, node, unit),
        section("Holders", show(holders, unit.holders, query, elements=_HOLDER_ELEMENTS, limit=_MAX_ROWS)),
        _readings(context, unit, query),
        _history(unit, query),
        _facts(node, unit),
        _further(context, node, unit),
    )
    return Page(title=title, content=content)


def _missing_device(node: Node, query: Query) -> Element:
    text = f"The device {query.unit!a} of the plugin {query.plugin!a} is not known: no agent of the node reports it. "
    return element("p", text, "See the node ", node_link(node.name), ".")


def _state(unit: ReportedUnit) -> Element:
    healthy = unit.phase == "healthy"
    warning = healthy and unit.known and bool(unit.reason)
    pairs = (
        ("State", badge(unit)),
        ("Known", "" if unit.known else "no: the source of the health does not answer"),
        ("Reason", unit.reason if not healthy else ""),
        ("Message", unit.text if not healthy else ""),
        ("Warning", f"{unit.reason}: {unit.text}" if warning else ""),
        ("Since", moment(unit.since)),
        ("Idle since", moment(unit.idle_since) if is_idle(unit) else ""),
    )
    return facts("State", pairs, block="state")


def _use(context: Context, node: Node, unit: ReportedUnit) -> Element:
    found = context.use_of(node.name, unit)
    limit = f" of {found.limit:.0f} W" if found.limit else ""
    pairs = (
        ("Busy", "-" if found.busy is None else f"{found.busy:.0%}"),
        ("Memory", si(found.memory, "B") if found.memory is not None else ""),
        ("Power", "-" if found.power is None else f"{found.power:.0f} W{limit}"),
    )
    histories = {name: context.use.history(node.name, unit, name, context.now) for name in ("busy", "memory", "power")}
    percent = [None if value is None else value * 100 for value in histories["busy"]]
    plots = (
        plot("Busy", percent, "%", highest=100),
        plot("Memory", histories["memory"], "B"),
        plot("Power", histories["power"], "W", highest=found.limit or 0.0),
    )
    drawn = [keyed(each, str(index)) for index, each in enumerate(plots) if each is not None]
    return element("div", facts("Use", pairs, block="use"), live(element("div", *drawn, class_="plots"), "plots"))


def _facts(node: Node, unit: ReportedUnit) -> Element:
    pairs = (
        ("Node", node_link(node.name)),
        ("Plugin", unit.plugin),
        ("Model", unit.model),
        ("Kernel name", unit.device),
        ("PCI address", unit.bdf),
        ("NUMA node", "" if unit.numa is None or unit.numa < 0 else str(unit.numa)),
        ("IDs", ", ".join(f"{count} {name}" for name, count in sorted(unit.ids.items()))),
    )
    return facts("Device", pairs, block="facts")


def _history(unit: ReportedUnit, query: Query) -> Element:
    table = Table[tuple[int, Change]](
        screen="device",
        caption="Changes of the state",
        columns=(
            Column("time", "Time", lambda each: each[1].time, kind="time"),
            Column("state", "State", lambda each: each[1].phase),
            Column("reason", "Reason", lambda each: each[1].reason),
            Column("message", "Message", lambda each: each[1].text),
        ),
        key=lambda each: f"{each[0]} {each[1].time}",
        name="history",
        empty="No change since the start of the agent.",
        noun="change",
    )
    changes = sorted(enumerate(unit.history), key=lambda each: (-each[1].time, -each[0]))
    return section("History", show(table, changes, query))


# Values


def _readings(context: Context, unit: ReportedUnit, query: Query) -> Element:
    found = _device_of(context, unit)
    problem = context.readings.problem if context.readings is not None else "they were not requested"
    if found is None:
        empty = f"No reading: {problem or 'the agent has none of this device'}."
    elif found.stuck:
        empty = "No reading: the device does not answer."
    else:
        empty = "No reading: the device is asleep." if not found.awake else "No reading: the driver provides none."
    values = found.values if found is not None else ()
    limits = [value for value in values if "limit" in value.labels]
    own_values = [each for each in values if "limit" not in each.labels]
    table = Table[Value](
        screen="device",
        caption="Current values",
        columns=(
            Column("value", "Value", lambda each: unit_of(each.name)[0]),
            Column("part", "Part", _part),
            Column("now", "Now", lambda each: each.value, lambda each: si(each.value, unit_of(each.name)[1]), "number"),
            Column("limits", "Limits", lambda each: ", ".join(
                f"{limit.labels['limit']} {si(limit.value, unit_of(limit.name)[1])}"
                for limit in limits
                if limit.labels.get("sensor") == each.labels.get("sensor") and _limits(limit.name, each.name))),
        ),
        key=lambda each: f"{each.name} {_part(each)}",
        name="readings",
        empty=empty,
        noun="value",
    )  # fmt: skip
    alone = [limit for limit in limits if not any(_limits(limit.name, each.name) for each in own_values)]
    rows = show(table, [*own_values, *alone], query, elements=_VALUE_ELEMENTS, limit=_MAX_VALUES)
    missing_values = element("p", *_missing(found), class_="quiet") if found is not None else None
    return section("Current values", rows, missing_values)


def _part(value: Value) -> str:
    return ", ".join(text for name, text in value.labels.items() if name not in ("plugin", "device", "bdf"))


def _device_of(context: Context, unit: ReportedUnit) -> DeviceReadings | None:
    devices = context.readings.devices if context.readings is not None else ()
    own_devices = (each for each in devices if each.plugin == unit.plugin)
    return next(
        (each for each in own_devices if each.device in (unit.device, unit.unit) or each.bdf == unit.bdf != ""), None
    )


def _missing(found: DeviceReadings) -> Sequence[str]:
    counted = [f"{count} {_OUTCOMES[name]}" for name, count in sorted(found.outcomes.items()) if name in _OUTCOMES]
    return [f"Values without a reading: {', '.join(counted)}."] if counted else []


def _limits(limit: str, name: str) -> bool:
    """Whether a family has the limits of another: `…_power_limit_watts` of `…_power_watts`."""
    return limit == name or limit.replace("_limit_", "_") == name


# Further


def _further(context: Context, node: Node, unit: ReportedUnit) -> Element:
    commands = [
        f"kubectl describe node {shlex.quote(node.name)}",
        f"kubectl accelplane inspect --cluster --node {shlex.quote(node.name)}",
        f"accelplane inspect --plugins {shlex.quote(unit.plugin)} -o wide    # on the node",
    ]
    pods = dict.fromkeys((each.namespace, each.pod) for each in unit.holders[:8] if each.pod)
    commands += [
        f"kubectl -n {shlex.quote(namespace)} describe pod {shlex.quote(pod)}"
        for namespace, pod in pods
        if context.visible(namespace)
    ]
    code = element("pre", element("code", "\n".join(commands)), tabindex="0", role="group", aria_label="Commands")
    return section("Next steps", code, grafana_link(context, node, unit))
