"""Devices in groups: by zone, rack or any other node label."""

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from .devices import Device, busy_column, selected
from .html import Element, element
from .page import Context, Page, choice, empty_list, filters
from .query import Query, link
from .summaries import states_of
from .table import Column, Listing, Table, arranged, show_part

ZONE = "topology.kubernetes.io/zone"
# Labels that are different on each node make no groups.
_MAX_LABELS = 150


class Group(Struct):
    """The devices of the nodes with a value of a label; None without the label."""

    value: str | None
    nodes: set[str]
    devices: list[Device]

    def count(self, state: str) -> int:
        return sum(state in states_of(each.unit) for each in self.devices)


def screen(context: Context, query: Query) -> Page:
    """The groups of the devices that match the filters, by the label of the query."""
    label = query.group or ZONE
    found, problem = selected(context, query)
    groups: dict[str | None, Group] = {}
    for each in found:
        value = each.node.labels.get(label)
        group = groups.get(value) or groups.setdefault(value, Group(value, set(), []))
        group.nodes.add(each.node.name)
        group.devices.append(each)
    table = _table(context, query, label)
    ordered = sorted(groups.values(), key=lambda each: (each.value is None, each.value or ""))
    listing = Listing(table, arranged(table, ordered, query))
    options = [(name, f"{name} ({nodes} nodes)") for name, nodes in _labels(context)]
    by = choice("group", "Grouped by", options, "" if label == ZONE else label, first="zone")
    form = filters(context, "groups", query, by, problem=problem)
    about = element("p", f"Devices by the node label {label}.")
    return Page(title="Groups", content=(form, about, *show_part(listing, query)), listing=listing)


def _labels(context: Context) -> Sequence[tuple[str, int]]:
    """The labels that some nodes share, with the number of nodes that have them."""
    nodes: Counter[str] = Counter()
    values: dict[str, set[str]] = {}
    for each in context.cluster.nodes.values():
        for name, value in each.labels.items():
            nodes[name] += 1
            values.setdefault(name, set()).add(value)
    shared = (name for name in nodes if name != ZONE and (len(values[name]) < nodes[name] or len(nodes) == 1))
    return [(name, nodes[name]) for name in sorted(shared)][:_MAX_LABELS]


def _table(context: Context, query: Query, label: str) -> Table[Group]:
    def address(each: Group, state: str = "") -> str:
        term = f"!{label}" if each.value is None else f"{label}={each.value}"
        labels = f"{query.labels},{term}" if query.labels else term
        narrowed = msgspec.structs.replace(query, labels=labels, state=state or query.state, sort="", start=0, group="")
        return link("devices", narrowed)

    def counted(state: str, title: str) -> Column[Group]:
        def shown(each: Group) -> Element | str:
            number = each.count(state)
            return element("a", f"{number:,}", href=address(each, state)) if number else "0"

        return Column(f"{state}_devices", title, lambda each: each.count(state), shown, "number")

    return Table(
        screen="groups",
        caption="Groups of devices",
        columns=(
            Column("value", label, lambda each: each.value, lambda each: element(
                "a", "without the label" if each.value is None else each.value or '""', href=address(each))),
            Column("nodes", "Nodes", lambda each: len(each.nodes), kind="number"),
            Column("devices", "Devices", lambda each: len(each.devices), kind="number"),
            counted("held", "Held"),
            counted("idle", "Idle"),
            counted("unhealthy", "Unhealthy"),
            Column("ids", "IDs", lambda each: sum(sum(device.unit.ids.values()) for device in each.devices),
                   kind="number"),
            busy_column(context, lambda each: each.devices),
        ),
        key=lambda each: "-" if each.value is None else f"={each.value}",
        empty=empty_list(query, "device", "No agent reports a device."),
        noun="group",
    )  # fmt: skip
