"""The first screen: the resources of the cluster, and problems."""

import heapq
from collections.abc import Iterator

from ..arithmetic import Overview, overview
from ..model import DevicePlugin
from .html import Element, element
from .nodes import problem_class
from .page import Context, Page, alert, count_cell, grafana_link, node_link, section
from .query import Query, link
from .summaries import Problem
from .table import Column, Table, counted, moment, show

_MAX_PROBLEMS = 12
_RESOURCE_ELEMENTS = 1350
_PLUGIN_ELEMENTS = 430


def screen(context: Context, query: Query) -> Page:
    """The overview."""
    parts = (_problems(context, query), _resources(context, query), _device_plugins(context, query))
    return Page(title="Overview", content=(*parts, grafana_link(context)))


def _problems(context: Context, query: Query) -> Element:
    summaries = context.summaries.values()
    total = sum(len(each.problems) for each in summaries)
    found = (problem for each in summaries for problem in each.problems)
    first = heapq.nsmallest(_MAX_PROBLEMS, found, key=lambda each: each.rank)
    table = Table[Problem](
        screen="overview",
        caption="Problems",
        columns=(
            Column("node", "Node", lambda each: each.node, _problem_node),
            Column("problem", "Problem", lambda each: each.text, _problem, order=lambda each: each.rank),
            Column("since", "Since", lambda each: each.since, lambda each: moment(each.since), "time"),
        ),
        key=lambda each: f"{each.node} {each.plugin} {each.unit} {each.rank} {'' if each.unit else each.text}",
        name="problems",
        empty="No problem is known.",
        noun="problem",
    )
    rest = f"The {_MAX_PROBLEMS} most urgent of {counted(total, 'problem')}; "
    return section(
        "Problems",
        show(table, [*first, *_missing_agents(context)], query),
        element("p", rest, element("a", "see the nodes with problems first", href="nodes"), ".")
        if total > _MAX_PROBLEMS
        else None,
    )


def _missing_agents(context: Context) -> Iterator[Problem]:
    """A problem if some nodes have an agent and others do not. A cluster without agents is a supported setup."""
    missing = sum("no-agent" in each.node_states for each in context.summaries.values())
    if 0 < missing < len(context.summaries):
        text = f"{counted(missing, 'node')}: no agent with pages, the state of the devices is not known"
        yield Problem(6, "", text)


def _problem_node(problem: Problem) -> Element:
    if not problem.node:
        return element("a", "nodes without agent", href=link("nodes", Query(state="no-agent")))
    return node_link(problem.node)


def _problem(problem: Problem) -> Element | str:
    text: Element | str = problem.text
    if problem.unit:
        place = Query(node=problem.node, plugin=problem.plugin, unit=problem.unit)
        text = element("a", problem.text, href=link("device", place))
    return alert(text, bad=problem_class(problem.rank))


def _resources(context: Context, query: Query) -> Element:
    def of(each: Overview, state: str = "") -> str:
        return link("devices", Query(family=each.resource, state=state))

    table = Table[Overview](
        screen="overview",
        caption="Resources",
        columns=(
            Column("name", "Resource", lambda each: each.resource, lambda each: element(
                "a", each.resource, href=of(each))),
            Column("nodes", "Nodes", lambda each: each.nodes, lambda each: count_cell(
                each.nodes, link("nodes", Query(family=each.resource))), "number"),
            Column("devices", "Devices", lambda each: each.units, lambda each: count_cell(each.units, of(each)),
                   "number"),
            Column("ids", "IDs", lambda each: each.ids, kind="number"),
            Column("held", "Held IDs", lambda each: each.allocated, lambda each: count_cell(
                each.allocated, of(each, "held")), "number"),
            Column("free", "Free IDs", lambda each: each.free, kind="number"),
            Column("unhealthy", "Unhealthy", lambda each: each.unhealthy, lambda each: count_cell(
                each.unhealthy, of(each, "unhealthy"), bad=True), "number"),
            Column("affected", "Unhealthy and held", lambda each: each.affected, lambda each: count_cell(
                each.affected, of(each, "unhealthy"), bad=True), "number"),
            Column("unknown", "Unknown", lambda each: each.unknown, lambda each: count_cell(
                each.unknown, of(each, "unknown")), "number"),
            Column("idle", "Idle", lambda each: each.idle, lambda each: count_cell(each.idle, of(each, "idle")),
                   "number"),
            Column("remarks", "Remarks", lambda each: " ".join(_remarks(each)), lambda each: element(
                "td", " ".join(_remarks(each)), class_="long")),
        ),
        key=lambda each: each.resource,
        name="resources",
        empty="No node is known." if context.cluster.problem else "No node has a resource of the plugins.",
        noun="resource",
    )  # fmt: skip
    return section("Resources", show(table, overview(context.cluster), query, elements=_RESOURCE_ELEMENTS))


def _remarks(each: Overview) -> Iterator[str]:
    if each.unregistered:
        yield f"Not registered on {counted(each.unregistered, 'node')}."
    if each.unanswered:
        yield f"The agents of {counted(each.unanswered, 'node')} do not answer."
    if each.estimated:
        yield f"The allocation on {counted(each.estimated, 'node')} is not known."


def _device_plugins(context: Context, query: Query) -> Element:
    """The custom resources of the operator; the section is hidden without any."""
    found = context.cluster.device_plugins
    table = Table[DevicePlugin](
        screen="overview",
        caption="Device plugins of the operator",
        columns=(
            Column("kind", "Kind", lambda each: each.kind),
            Column("name", "Name", lambda each: each.name),
            Column("problem", "Problem", lambda each: each.problem, lambda each: element(
                "td", each.problem or "no problem", class_="long bad" if each.problem else "long quiet")),
            Column("desired", "Desired", lambda each: each.desired, kind="number"),
            Column("ready", "Ready", lambda each: each.ready, kind="number"),
            Column("nodes", "Nodes", lambda each: each.nodes, kind="number"),
        ),
        key=lambda each: f"{each.kind} {each.name}",
        name="plugins",
        noun="device plugin",
    )  # fmt: skip
    rows = show(table, found, query, elements=_PLUGIN_ELEMENTS, omitted=context.cluster.more_device_plugins)
    heading = element("h2", "Device plugins of the operator")
    return element("section", heading, rows, hidden=not found, data_optional=True)
