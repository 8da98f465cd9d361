"""The list of nodes: a cell for each device."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from accelplane.report.inventory import Holder, ReportedUnit

from ..arithmetic import allocation
from ..families import family_of
from ..model import Node
from .html import Element, element, keyed
from .page import Context, Page, cell, counted, empty_list, node_link, number, numeric, pages, part, skip_list, table
from .query import NodesQuery, PlaceQuery, SelectorError, Sort, link, selector_terms
from .summaries import STATES, Summary, states_of

_MAX_CELLS = 64
_MAX_RESOURCES = 20
_MAX_OPTIONS = 150
_NODE_STATES = (
    ("held", "held"), ("unheld", "free"), ("idle", "held and idle"), ("unanswered", "agent not answering"),
    ("no-agent", "without agent"), ("unregistered", "not registered"), ("cordoned", "cordoned"),
    ("not-ready", "node not ready"),
)  # fmt: skip
_COLUMNS: tuple[tuple[Sort, str], ...] = (("name", "Node"), ("problem", "State"), ("free", "Free IDs"))


def screen(context: Context, query: NodesQuery) -> Page:
    """The nodes that match the filters."""
    try:
        found, problem = _matching(context, query), ""
    except SelectorError as error:
        found, problem = [], str(error)
    ordered = sorted(found, key=_order(query.sort))
    rows = part([_row(each, query) for each in ordered[query.start : query.start + 100]])
    otherwise = "No node has a resource of the plugins or an agent."
    if context.cluster.problem:
        otherwise = "No node is known."
    empty = empty_list(query, len(found), noun="node", otherwise=otherwise)
    headers = [*(_header(query, name, text) for name, text in _COLUMNS), numeric("IDs"), "Devices"]
    return Page(
        title="Nodes",
        content=(
            _filters(context, query, problem),
            _legend(),
            skip_list(),
            table("Nodes and their devices", headers, rows, block="rows", empty=empty),
            pages("nodes", query, shown=len(rows), following=query.start + len(rows), total=len(ordered), noun="node"),
        ),
    )


def _order(sort: Sort) -> Callable[[Summary], "tuple[int, str]"]:
    if sort == "name":
        return lambda each: (0, each.node.name)
    if sort == "free":
        return lambda each: (-each.free, each.node.name)
    return lambda each: (each.rank, each.node.name)


def _matching(context: Context, query: NodesQuery) -> list[Summary]:
    """Raises `SelectorError`."""
    terms = selector_terms(query.labels)
    text, is_match = query.text.casefold(), _holder_filter(query.holder.casefold())
    return [
        each
        for each in context.summaries.values()
        if (not query.family or _has_family(each, query.family))
        and (not query.model or query.model in each.models)
        and (not query.state or _has_state(each, query))
        and all(term.matches(each.node.labels) for term in terms)
        and (not text or _has_text(each.node, text))
        and (not query.holder or _has_holder(context, each.node, is_match))
    ]


def _has_state(each: Summary, query: NodesQuery) -> bool:
    if query.state not in each.states:
        return False
    # With a family, one of its devices must have the state, not any device of the node.
    units = [unit for unit in each.node.units if not query.family or query.family in _families(unit)]
    if query.state in STATES:
        return any(query.state in states_of(unit) for unit in units)
    if query.state in ("held", "unheld"):
        return any(bool(unit.holders) is (query.state == "held") for unit in units)
    return query.state != "idle" or any(unit.holders and unit.idle_since for unit in units)


def _has_text(node: Node, text: str) -> bool:
    return text in node.name.casefold() or any(
        text in part.casefold()
        for unit in node.units
        for part in (unit.unit, unit.device, unit.bdf, unit.model, unit.reason, unit.text)
    )


def _holder_filter(text: str) -> Callable[[Holder], bool]:
    """A name before a `/` is complete: `a/` is the namespace a, `a/b/` its pod b, and `a/b` its pods that begin with b.

    Any other text is a part of the names.
    """
    namespace, separator, rest = text.partition("/")
    pod, end, _ = rest.partition("/")

    def matches(holder: Holder) -> bool:
        if not separator:
            return text in f"{holder.namespace}/{holder.pod}".casefold()
        name = holder.pod.casefold()
        return holder.namespace.casefold() == namespace and (name == pod if end else name.startswith(pod))

    return matches


def _has_holder(context: Context, node: Node, is_match: Callable[[Holder], bool]) -> bool:
    holders = (holder for holders in (node.holders, *(unit.holders for unit in node.units)) for holder in holders)
    return any(is_match(holder) and context.visible(holder.namespace) for holder in holders)


def _has_family(each: Summary, family: str) -> bool:
    """Whether a node has devices of a family, or of one resource: the overview counts by resource."""
    if "/" not in family:
        return family in each.families
    return any(resource.name == family for resource in each.node.resources) or any(
        family in unit.ids for unit in each.node.units
    )


def _families(unit: ReportedUnit) -> Iterator[str]:
    """The values of the filter that select a device."""
    yield unit.plugin
    yield from unit.ids
    yield from (family_of(name) for name in unit.ids)


def _row(each: Summary, query: NodesQuery) -> Element:
    node = each.node
    units = [unit for unit in node.units if not query.family or query.family in _families(unit)]
    cells = [cell(node.name, unit) for unit in units[:_MAX_CELLS]]
    if len(units) > _MAX_CELLS:
        more = f"{counted(len(units) - _MAX_CELLS, 'device')} more"
        cells.append(element("a", more, href=link("node", PlaceQuery(node=node.name))))
    devices = element("td", *cells, class_="cells") if cells else element("td", _without_units(node), class_="quiet")
    problem = each.problems[0] if each.problems else None
    kind = "" if problem is None else "urgent" if problem.rank == 0 else "bad" if problem.rank < 4 else "minor"
    more = f" and {len(each.problems) - 1} more" if len(each.problems) > 1 else ""
    words = ", ".join([*([problem.text + more] if problem else []), *(["cordoned"] if node.cordoned else [])])
    return keyed(
        element(
            "tr",
            element("th", node_link(node.name), scope="row"),
            element("td", words or "no problem", class_=kind or "quiet"),
            number(each.free),
            number(each.ids),
            devices,
        ),
        node.name,
    )


def _without_units(node: Node) -> str:
    texts = [f"{allocation(node, each).ids} {each.name}" for each in node.resources[:_MAX_RESOURCES]]
    if (rest := len(node.resources) - len(texts)) > 0:
        texts.append(f"{counted(rest, 'resource')} more")
    resources = ", ".join(texts)
    source = "agent not answering" if node.agents else "no agent"
    return f"{source}; numbers from the API server: {resources or 'no resource'}"


def _header(query: NodesQuery, sort: Sort, text: str) -> Element:
    chosen = query.sort == sort
    address = link("nodes", msgspec.structs.replace(query, sort=sort, start=0))
    order = ("descending" if sort == "free" else "ascending") if chosen else None
    return element(
        "th",
        element("a", text, href=address),
        scope="col",
        aria_sort=order,
        class_="number" if sort == "free" else None,
    )


def _filters(context: Context, query: NodesQuery, problem: str) -> Element:
    summaries = context.summaries.values()
    families = sorted(frozenset[str]().union(*(each.families for each in summaries)))[:_MAX_OPTIONS]
    models = sorted(frozenset[str]().union(*(each.models for each in summaries)))[:_MAX_OPTIONS]
    texts = {"unhealthy": "unhealthy or recovering"}
    states = [(state, texts.get(state, state)) for state in STATES] + list(_NODE_STATES)
    return element(
        "form",
        _choice("family", "Family", [(each, each) for each in families], query.family),
        _choice("state", "State", states, query.state),
        _choice("model", "Model", [(each, each) for each in models], query.model),
        _input("labels", "Node labels", query.labels, hint="zone=a,!test", problem=problem),
        _input("holder", "Holder", query.holder, hint="namespace/pod"),
        _input("text", "Text", query.text, hint="name or reason"),
        _choice("sort", "Order", [("name", "name"), ("free", "free IDs")], query.sort, first=("problem", "problem")),
        element("button", "Apply", type="submit"),
        element("a", "Clear", href="nodes"),
        method="get",
        action="nodes",
        role="search",
        class_="filters",
    )


def _choice(
    name: str,
    label: str,
    options: Sequence[tuple[str, str]],
    chosen: str,
    *,
    first: tuple[str, str] = ("", "all"),
) -> Element:
    known = [first, *options]
    if chosen not in dict(known):
        known.append((chosen, chosen))
    made = (element("option", text, value=value, selected=value == chosen) for value, text in known)
    return element("label", f"{label} ", element("select", *made, name=name))


def _input(name: str, label: str, value: str, *, hint: str, problem: str = "") -> Element:
    field = element(
        "input", type="search", name=name, value=value, placeholder=hint, maxlength=253,
        aria_invalid="true" if problem else None, aria_describedby=f"{name}-problem" if problem else None,
    )  # fmt: skip
    return element(
        "label", f"{label} ", field, element("span", problem, id=f"{name}-problem", class_="bad") if problem else None
    )


def _legend() -> Element:
    letters = (("H", "healthy"), ("S", "suspect"), ("U", "unhealthy"), ("R", "recovering"), ("?", "unknown"))
    marks = (
        element("li", element("span", letter, class_=f"mark {state}", aria_hidden="true"), f" {state}")
        for letter, state in letters
    )
    return element(
        "ul", *marks, element("li", "The filled part of a cell is held."), class_="legend", aria_label="Signs"
    )
