"""The list of nodes: a cell for each device, those that the filters do not select are dimmed."""

from collections.abc import Sequence

from msgspec import Struct

from accelplane.report.inventory import ReportedUnit

from ..arithmetic import allocation
from ..model import Node
from .html import Element, element
from .page import Context, Page, alert, device_cell, empty_list, filters, legend, node_link
from .query import Query, link
from .selection import Selection, SelectorError
from .summaries import Summary
from .table import Column, Listing, Table, arranged, counted, show_part

_MAX_CELLS = 64
_MAX_RESOURCES = 20


class NodeRow(Struct, frozen=True):
    """A node with the devices that the filters select."""

    summary: Summary
    units: Sequence[ReportedUnit]

    @property
    def node(self) -> Node:
        return self.summary.node


def screen(context: Context, query: Query) -> Page:
    """The nodes with devices that match the filters, and those without devices that match themselves."""
    problem = ""
    found: list[NodeRow] = []
    try:
        selection = Selection(query, context.visible)
    except SelectorError as error:
        problem = str(error)
    else:
        for each in context.summaries.values():
            units = selection.units(each)
            if units or selection.selects(each):
                found.append(NodeRow(each, units))
    otherwise = "No node has a resource of the plugins or an agent."
    table = Table(
        screen="nodes",
        caption="Nodes and their devices",
        columns=_columns(query),
        key=lambda each: each.node.name,
        empty=empty_list(query, "node", "No node is known." if context.cluster.problem else otherwise),
        noun="node",
    )
    found.sort(key=lambda each: (each.summary.rank, each.node.name))
    listing = Listing(table, arranged(table, found, query))
    skip = element("p", element("a", "Skip the list", href="#pages"), class_="skip-list")
    content = (filters(context, "nodes", query, problem=problem), legend(), skip, *show_part(listing, query))
    return Page(title="Nodes", content=content, listing=listing)


def _columns(query: Query) -> Sequence[Column[NodeRow]]:
    return (
        Column("name", "Node", lambda each: each.node.name, lambda each: node_link(each.node.name)),
        Column("problem", "State", lambda each: _words(each.summary), _problem, order=lambda each: -each.summary.rank),
        Column("free", "Free IDs", lambda each: each.summary.free, kind="number"),
        Column("ids", "IDs", lambda each: each.summary.ids, kind="number"),
        Column("selected", "Selected", lambda each: len(each.units), kind="number", shown=query.has_filters),
        Column("devices", "Devices", lambda each: each.summary.devices, _cells),
        Column("held_devices", "Held", lambda each: each.summary.held, kind="number", shown=False),
        Column("unhealthy_devices", "Unhealthy", lambda each: each.summary.unhealthy, kind="number", shown=False),
    )


def _words(each: Summary) -> str:
    problem = each.problems[0].text if each.problems else ""
    more = f" and {len(each.problems) - 1} more" if len(each.problems) > 1 else ""
    return ", ".join([*([problem + more] if problem else []), *(["cordoned"] if each.node.cordoned else [])])


def _problem(each: NodeRow) -> Element | str:
    rank = each.summary.rank if each.summary.problems else None
    kind = "quiet" if rank is None else problem_class(rank)
    return alert(_words(each.summary) or "no problem", bad=kind)


def problem_class(rank: int) -> str:
    """The class of a problem's text."""
    return "urgent" if rank == 0 else "bad" if rank < 4 else "minor"


def _cells(each: NodeRow) -> Element:
    node, chosen = each.node, {id(unit) for unit in each.units}
    # Selected devices come first where not all fit; otherwise the devices keep their places.
    units = node.units if len(node.units) <= _MAX_CELLS else sorted(node.units, key=lambda unit: id(unit) not in chosen)
    cells = [device_cell(node.name, unit, selected=id(unit) in chosen) for unit in units[:_MAX_CELLS]]
    if len(units) > _MAX_CELLS:
        more = f"{counted(len(units) - _MAX_CELLS, 'device')} more"
        cells.append(element("a", more, href=link("node", Query(node=node.name))))
    return element("td", *cells, class_="cells") if cells else element("td", _without_units(node), class_="quiet")


def _without_units(node: Node) -> str:
    texts = [f"{allocation(node, each).ids} {each.name}" for each in node.resources[:_MAX_RESOURCES]]
    if (rest := len(node.resources) - len(texts)) > 0:
        texts.append(f"{counted(rest, 'resource')} more")
    source = "agent not answering" if node.agents else "no agent"
    return f"{source}; numbers from the API server: {', '.join(texts) or 'no resource'}"
