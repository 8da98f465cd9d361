"""The first screen: the resources of the cluster, and problems."""

import heapq
from collections.abc import Iterator

from ..arithmetic import Overview, overview
from ..model import DevicePlugin
from .html import Element, element, keyed
from .page import (
    Context,
    Page,
    counted,
    moment,
    more,
    node_link,
    number,
    numeric,
    optional,
    part,
    row,
    row_header,
    table,
)
from .query import ListQuery, NodesQuery, PlaceQuery, link
from .summaries import Problem

_MAX_PROBLEMS = 12
_NUMBERS = (
    "Nodes", "Devices", "IDs", "Held IDs", "Free IDs", "Unhealthy", "Unhealthy and held", "Unknown", "Idle",
)  # fmt: skip
_PLUGIN_HEADERS = ("Kind", "Name", "Problem", *(numeric(name) for name in ("Desired", "Ready", "Nodes")))
_RESOURCE_ELEMENTS = 1400
_PLUGIN_ELEMENTS = 450
_HEADERS = ("Resource", *(numeric(name) for name in _NUMBERS), "Remarks")


def screen(context: Context, _query: ListQuery) -> Page:
    """The overview."""
    return Page(title="Overview", content=(_problems(context), _resources(context), _device_plugins(context)))


def _problems(context: Context) -> Element:
    summaries = context.summaries.values()
    total = sum(len(each.problems) for each in summaries)
    first = heapq.nsmallest(
        _MAX_PROBLEMS, (problem for each in summaries for problem in each.problems), key=lambda each: each.rank
    )
    rows = [*map(_problem, first), *_missing_agents(context)]
    problem_table = table(
        "Problems", ("Node", "Problem", "Since"), rows, block="problems", empty="No problem is known."
    )
    rest_link = link("nodes", NodesQuery())
    rest = f"The {_MAX_PROBLEMS} most urgent of {counted(total, 'problem')}; "
    return element(
        "section",
        element("h2", "Problems"),
        problem_table,
        element("p", rest, element("a", "see the nodes with problems first", href=rest_link), ".")
        if total > _MAX_PROBLEMS
        else None,
    )


def _missing_agents(context: Context) -> Iterator[Element]:
    """A problem if some nodes have an agent and others do not. A cluster without agents is a supported setup."""
    missing = sum("no-agent" in each.states for each in context.summaries.values())
    if 0 < missing < len(context.summaries):
        address = link("nodes", NodesQuery(state="no-agent"))
        head = element("a", counted(missing, "node"), href=address)
        problem = "no agent with pages: the state of the devices is not known"
        yield row("without agent", element("td", problem, class_="minor"), "-", head=head)


def _problem(problem: Problem) -> Element:
    text: Element | str = problem.text
    if problem.unit:
        place = PlaceQuery(node=problem.node, plugin=problem.plugin, unit=problem.unit)
        text = element("a", problem.text, href=link("device", place))
    key = f"{problem.node} {problem.plugin} {problem.unit} {problem.rank} {problem.text if not problem.unit else ''}"
    kind = "urgent" if problem.rank == 0 else "bad" if problem.rank < 4 else "minor"
    return row(key, element("td", text, class_=kind), moment(problem.since), head=node_link(problem.node))


def _resources(context: Context) -> Element:
    found = overview(context.cluster)
    rows = part((_resource(each) for each in found), elements=_RESOURCE_ELEMENTS)
    empty = "No node is known." if context.cluster.problem else "No node has a resource of the plugins."
    return element(
        "section",
        element("h2", "Resources"),
        table("Resources", _HEADERS, rows, block="resources", empty=empty),
        more("resources", len(found) - len(rows), noun="resource"),
    )


def _resource(each: Overview) -> Element:
    def of(state: str) -> str:
        return link("nodes", NodesQuery(family=each.resource, state=state))

    return keyed(
        element(
            "tr",
            element("th", element("a", each.resource, href=of("")), scope="row"),
            number(each.nodes, of("")),
            number(each.units, of("")),
            number(each.ids),
            number(each.allocated, of("held")),
            number(each.free),
            number(each.unhealthy, of("unhealthy"), alert=True),
            number(each.affected, of("unhealthy"), alert=True),
            number(each.unknown, of("unknown")),
            number(each.idle, of("idle")),
            element("td", " ".join(_remarks(each)), class_="long"),
        ),
        each.resource,
    )


def _remarks(each: Overview) -> Iterator[str]:
    if each.unregistered:
        yield f"Not registered on {counted(each.unregistered, 'node')}."
    if each.unanswered:
        yield f"The agents of {counted(each.unanswered, 'node')} do not answer."
    if each.estimated:
        yield f"The allocation on {counted(each.estimated, 'node')} is not known."


def _device_plugins(context: Context) -> Element:
    """The custom resources of the operator, if there are any."""
    found = context.cluster.device_plugins
    rows = part(map(_device_plugin, found), elements=_PLUGIN_ELEMENTS)
    omitted = context.cluster.more_device_plugins + len(found) - len(rows)
    return optional(
        element("h2", "Device plugins of the operator"),
        table("Device plugins of the operator", _PLUGIN_HEADERS, rows, block="plugins", empty=""),
        more("plugins", omitted, noun="device plugin"),
        shown=bool(rows),
    )


def _device_plugin(each: DevicePlugin) -> Element:
    return keyed(
        element(
            "tr",
            row_header(each.kind),
            row_header(each.name),
            element("td", each.problem or "no problem", class_="long bad" if each.problem else "long quiet"),
            number(each.desired),
            number(each.ready),
            number(each.nodes),
        ),
        f"{each.kind} {each.name}",
    )
