"""The list of devices of all nodes."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from accelplane.report.inventory import Holder, ReportedUnit

from ..model import Node
from .html import Element, element
from .page import Context, Page, badge, device_link, empty_list, filters, joined, node_link, pod_name, pod_text
from .query import Query, ScreenName
from .selection import Selection, SelectorError
from .summaries import is_idle, state_of
from .table import Cell, Column, Listing, Table, age_column, arranged, moment, show_part
from .values import heat, measured, si

_MAX_NAMES = 4

T = TypeVar("T")


class Device(Struct, frozen=True, gc=False):
    """A device of a node."""

    node: Node
    unit: ReportedUnit


def screen(context: Context, query: Query) -> Page:
    """The devices that match the filters."""
    found, problem = selected(context, query)
    empty = empty_list(query, "device", "No agent reports a device.")
    table = device_table(context, "devices", empty=empty)
    rows = sorted(found, key=lambda each: (urgency(each.unit), each.node.name))
    listing = Listing(table, arranged(table, rows, query))
    content = (filters(context, "devices", query, problem=problem), *show_part(listing, query))
    return Page(title="Devices", content=content, listing=listing)


def selected(context: Context, query: Query) -> tuple[Sequence[Device], str]:
    """The devices that a query selects, or none and what is wrong with it."""
    try:
        selection = Selection(query, context.visible)
    except SelectorError as error:
        return (), str(error)
    return [Device(each.node, unit) for each in context.summaries.values() for unit in selection.units(each)], ""


def device_table(
    context: Context, screen_name: ScreenName, *, name: str = "rows", empty: str, of_node: bool = False
) -> Table[Device]:
    """A table of devices, with or without their nodes."""
    return Table(
        screen=screen_name,
        caption="Devices",
        columns=_columns(context, of_node=of_node),
        key=lambda each: f"{each.node.name} {each.unit.plugin} {each.unit.unit}",
        name=name,
        empty=empty,
        noun="device",
    )


def _columns(context: Context, *, of_node: bool) -> Sequence[Column[Device]]:
    def use(each: Device) -> tuple[float | None, ...]:
        found = context.use_of(each.node.name, each.unit)
        return found.busy, found.memory, found.power, found.temperature

    return (
        Column("device", "Device", lambda each: each.unit.unit, _link),
        Column("node", "Node", lambda each: each.node.name, lambda each: node_link(each.node.name), shown=not of_node),
        Column("state", "State", lambda each: state_of(each.unit), _state, order=lambda each: urgency(each.unit)),
        age_column("age_seconds", "Age", lambda each: each.unit.since, context.now),
        Column("busy_percent", "Busy", lambda each: _percent(use(each)[0]), lambda each: heat(use(each)[0]), "number"),
        Column("memory_bytes", "Memory", lambda each: use(each)[1], lambda each: si(use(each)[1], "B"), "number",
               shown=False),
        Column("power_watts", "Power", lambda each: use(each)[2], lambda each: measured(use(each)[2], "W"), "number"),
        Column("temperature_celsius", "Temp.", lambda each: use(each)[3], lambda each: measured(use(each)[3], "°C"),
               "number"),
        age_column("idle_seconds", "Idle", lambda each: each.unit.idle_since if is_idle(each.unit) else 0.0,
                   context.now),
        Column("held_since", "Held for", lambda each: _held_since(each.unit),
               lambda each: moment(_held_since(each.unit), age=True), "time"),
        Column("ids", "IDs", lambda each: sum(each.unit.ids.values()), kind="number", shown=False),
        Column("held_ids", "Held IDs", _held, lambda each: f"{_held(each)} of {sum(each.unit.ids.values())}",
               "number"),
        Column("holders", "Holders", lambda each: _texts(context, each.unit.holders),
               lambda each: element("td", *names(context, each.unit.holders), class_="long")),
        Column("plugin", "Plugin", lambda each: each.unit.plugin, shown=of_node),
        Column("model", "Model", lambda each: each.unit.model,
               lambda each: element("td", each.unit.model or "-", class_="model")),
        Column("reason", "Reason", lambda each: each.unit.reason, shown=False),
        Column("message", "Message", lambda each: each.unit.text, shown=False),
        Column("bdf", "PCI address", lambda each: each.unit.bdf, shown=of_node),
        Column("numa", "NUMA", lambda each: None if (each.unit.numa or 0) < 0 else each.unit.numa, kind="number",
               shown=of_node),
    )  # fmt: skip


def urgency(unit: ReportedUnit) -> int:
    """The order of devices: those that are unhealthy and held, unhealthy, changing, not known, and the others."""
    if unit.phase == "healthy":
        return 4 if unit.known else 3
    return 2 if unit.phase in ("suspect", "recovering") else 0 if unit.holders else 1


def names(context: Context, holders: Iterable[Holder]) -> Sequence[Cell]:
    """The pods of holders, the first ones with links."""
    pods = list(dict.fromkeys((holder.namespace, holder.pod) for holder in holders))
    return joined([pod_name(context, *pod) for pod in pods], _MAX_NAMES) or ["-"]


def busy_column(context: Context, devices: Callable[[T], Sequence[Device]]) -> Column[T]:
    """A column of the mean busy share of devices."""

    def busy(row: T) -> float | None:
        shares = [context.use_of(each.node.name, each.unit).busy for each in devices(row)]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    return Column("busy_percent", "Busy", lambda row: _percent(busy(row)), lambda row: heat(busy(row)), "number")


def _link(each: Device) -> Element:
    return element("a", each.unit.unit, href=device_link(each.node.name, each.unit))


def _state(each: Device) -> Element:
    unit = each.unit
    reason = f" ({unit.reason})" if unit.reason and unit.phase != "healthy" else None
    return element("td", badge(unit), reason)


def _held(each: Device) -> int:
    return sum(holder.count for holder in each.unit.holders)


def _held_since(unit: ReportedUnit) -> float:
    return min((holder.since for holder in unit.holders if holder.since), default=0.0)


def _texts(context: Context, holders: Iterable[Holder]) -> str:
    return " ".join(dict.fromkeys(pod_text(context, holder.namespace, holder.pod) for holder in holders))


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100, 1)
