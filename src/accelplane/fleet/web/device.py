"""One device: facts, state, holders, current values, history, and next steps."""

import shlex
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from accelplane.report.inventory import Change, ReportedUnit
from accelplane.report.readings import DeviceReadings, Value

from ..model import Node
from .html import Element, element
from .node import HOLDER_HEADERS, holder_row, missing, numbered
from .page import Context, Page, badge, facts, moment, more, node_link, numeric, part, row, table
from .query import PlaceQuery

_MAX_HOLDERS = 200
_MAX_VALUES = 150
# Limits of the elements of each table. The page has at most 2,500.
_HOLDER_ELEMENTS = 900
_VALUE_ELEMENTS = 900
_UNITS = (
    ("_celsius", "°C"), ("_watts", "W"), ("_joules_total", "J"), ("_hertz", "Hz"), ("_bytes", "B"), ("_volts", "V"),
    ("_amperes", "A"), ("_rpm", "rpm"), ("_seconds_total", "s"), ("_seconds", "s"), ("_transfers_per_second", "T/s"),
    ("_bytes_per_second", "B/s"), ("_lanes", "lanes"), ("_ratio", ""), ("_total", ""),
)  # fmt: skip
_ACRONYMS = frozenset({"dlb", "fpga", "gpu", "nic", "npu", "pci", "qat", "sgx"})
# Two values of a link have the same words without these.
_QUANTITIES: Mapping[str, str] = {"T/s": "speed", "lanes": "width"}
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_OUTCOMES: Mapping[str, str] = {
    "missing": "not provided by the driver", "denied": "denied", "asleep": "asleep", "invalid": "not a valid value",
    "error": "read error", "timeout": "no answer in time",
}  # fmt: skip


def screen(context: Context, query: PlaceQuery) -> Page:
    """The device of the query."""
    node = context.cluster.nodes.get(query.node)
    unit = next((u for u in node.units if (u.plugin, u.unit) == (query.plugin, query.unit)), None) if node else None
    title = f"Device {query.unit} on {query.node}"
    if node is None:
        return Page(title=title, content=(missing(query.node),), found=False)
    if unit is None:
        return Page(title=title, content=(_missing_device(node, query),), found=False)
    return Page(
        title=title,
        content=(
            _state(unit),
            _holders(context, unit),
            _readings(context, unit),
            _history(unit),
            _facts(node, unit),
            _further(context, node, unit),
        ),
    )


def _missing_device(node: Node, query: PlaceQuery) -> Element:
    text = f"The device {query.unit!a} of the plugin {query.plugin!a} is not known: no agent of the node reports it. "
    return element("p", text, "See the node ", node_link(node.name), ".")


def _state(unit: ReportedUnit) -> Element:
    healthy = unit.phase == "healthy"
    warning = healthy and unit.known and bool(unit.reason)
    return facts(
        "State",
        (
            ("State", badge(unit)),
            ("Known", "" if unit.known else "no: the source of the health does not answer"),
            ("Reason", unit.reason if not healthy else ""),
            ("Message", unit.text if not healthy else ""),
            ("Warning", f"{unit.reason}: {unit.text}" if warning else ""),
            ("Since", moment(unit.since)),
            ("Idle since", moment(unit.idle_since) if unit.holders and unit.idle_since else ""),
        ),
        block="state",
    )


def _facts(node: Node, unit: ReportedUnit) -> Element:
    ids = ", ".join(f"{count} {name}" for name, count in sorted(unit.ids.items()))
    return facts(
        "Device",
        (
            ("Node", node_link(node.name)),
            ("Plugin", unit.plugin),
            ("Model", unit.model),
            ("Kernel name", unit.device),
            ("PCI address", unit.bdf),
            ("NUMA node", "" if unit.numa is None or unit.numa < 0 else str(unit.numa)),
            ("IDs", ids),
        ),
        block="facts",
    )


def _holders(context: Context, unit: ReportedUnit) -> Element:
    found = (holder_row(context, each) for each in unit.holders)
    rows = numbered(part(found, elements=_HOLDER_ELEMENTS, limit=_MAX_HOLDERS))
    return element(
        "section",
        element("h2", "Holders"),
        table("Containers with this device", HOLDER_HEADERS, rows, block="holders", empty="No container has it."),
        more("holders", len(unit.holders) - len(rows), noun="holder"),
    )


def _history(unit: ReportedUnit) -> Element:
    changes = sorted(enumerate(unit.history), key=lambda each: (-each[1].time, -each[0]))
    rows = [_change(index, each) for index, each in changes]
    return element(
        "section",
        element("h2", "History"),
        table(
            "Changes of the state", ("Time", "State", "Reason", "Message"), rows, block="history",
            empty="No change since the start of the agent.",
        ),
    )  # fmt: skip


def _change(index: int, change: Change) -> Element:
    return row(f"{index} {change.time}", change.phase, change.reason or "-", change.text, head=moment(change.time))


# Values


def _readings(context: Context, unit: ReportedUnit) -> Element:
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
    rows = part((_value(each, limits) for each in own_values), elements=_VALUE_ELEMENTS, limit=_MAX_VALUES)
    return element(
        "section",
        element("h2", "Current values"),
        table("Current values", ("Value", "Part", numeric("Now"), "Limits"), rows, block="readings", empty=empty),
        more("readings", len(own_values) - len(rows), noun="value"),
        element("p", *_missing(found), class_="quiet") if found is not None else None,
    )


def _device_of(context: Context, unit: ReportedUnit) -> DeviceReadings | None:
    devices = context.readings.devices if context.readings is not None else ()
    own_devices = (each for each in devices if each.plugin == unit.plugin)
    return next(
        (each for each in own_devices if each.device in (unit.device, unit.unit) or each.bdf == unit.bdf != ""), None
    )


def _missing(found: DeviceReadings) -> list[str]:
    counted = [f"{count} {_OUTCOMES[name]}" for name, count in sorted(found.outcomes.items()) if name in _OUTCOMES]
    return [f"Values without a reading: {', '.join(counted)}."] if counted else []


def _value(value: Value, limits: Sequence[Value]) -> Element:
    labels = {name: text for name, text in value.labels.items() if name not in ("plugin", "device", "bdf")}
    base, unit = _unit_of(value.name)
    own_limits = [
        f"{limit.labels['limit']} {_shown(limit.value, _unit_of(limit.name)[1])}"
        for limit in limits
        if limit.labels.get("sensor") == value.labels.get("sensor") and _limits(limit.name, value.name)
    ]
    text = ", ".join(labels.values())
    key = f"{value.name} {text}"
    return row(
        key, text or "-", element("td", _shown(value.value, unit), class_="number"), ", ".join(own_limits), head=base
    )


def _limits(limit: str, name: str) -> bool:
    """Whether a family has the limits of another: `…_power_limit_watts` of `…_power_watts` and of the energy."""
    return limit == name or limit.replace("_limit_", "_") == name or ("_power_limit_" in limit and "_energy_" in name)


def _unit_of(name: str) -> tuple[str, str]:
    """The name of a metric in words, and its unit."""
    base, unit = name.removeprefix("accelplane_"), ""
    for suffix, symbol in _UNITS:
        if base.endswith(suffix):
            base, unit = base.removesuffix(suffix), symbol
            break
    words = base.removeprefix("device_").split("_")
    if unit in _QUANTITIES:
        words.append(_QUANTITIES[unit])
    words = [word.upper() if word in _ACRONYMS else word for word in words]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]]), unit


def _shown(value: float, unit: str) -> str:
    if unit in ("Hz", "B", "B/s", "T/s", "J"):
        for prefix, factor in _PREFIXES:
            if abs(value) >= factor:
                return f"{value / factor:.4g} {prefix}{unit}"
    number = f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
    return f"{number} {unit}".strip()


# Further


def _further(context: Context, node: Node, unit: ReportedUnit) -> Element:
    commands = [
        f"kubectl describe node {shlex.quote(node.name)}",
        f"kubectl accelplane inspect --cluster --node {shlex.quote(node.name)}",
        f"accelplane inspect --plugins {shlex.quote(unit.plugin)} -o wide    # on the node",
    ]
    seen: set[tuple[str, str]] = set()
    for holder in unit.holders[:8]:
        pod = holder.namespace, holder.pod
        if holder.pod and pod not in seen and context.visible(holder.namespace):
            seen.add(pod)
            commands.append(f"kubectl -n {shlex.quote(holder.namespace)} describe pod {shlex.quote(holder.pod)}")
    grafana = grafana_link(context.grafana_url, node.name, unit)
    return element(
        "section",
        element("h2", "Next steps"),
        element("pre", element("code", "\n".join(commands)), tabindex="0", role="group", aria_label="Commands"),
        element("p", element("a", "Open in Grafana", href=grafana, rel="noreferrer")) if grafana else None,
    )


def grafana_link(template: str, node: str, unit: ReportedUnit) -> str:
    """The address of a dashboard: the template with `{node}`, `{plugin}` and `{device}` replaced."""
    values = {"{node}": node, "{plugin}": unit.plugin, "{device}": unit.device or unit.unit}
    for name, value in values.items():
        template = template.replace(name, quote(value, safe="", errors="replace"))
    return template
