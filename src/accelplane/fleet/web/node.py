"""One node: its resources, devices, agents, and hardware that is not used."""

from collections.abc import Iterator

from accelplane.report.inventory import Holder, SkippedHardware

from ..arithmetic import allocation
from ..model import Agent, Node, NodeResource
from .devices import Device, device_table, urgency
from .html import Element, element
from .page import Context, Page, alert, facts, grafana_link, pod_name, pod_text, section
from .query import Query, ScreenName
from .summaries import REGISTERED
from .table import Column, Table, moment, show

_MAX_ROWS = 200
# Limits of the elements of each table. The page has at most 2,500.
_AGENT_ELEMENTS = 200
_RESOURCE_ELEMENTS = 450
_DEVICE_ELEMENTS = 1050
_SKIPPED_ELEMENTS = 350


def screen(context: Context, query: Query) -> Page:
    """The node of the query."""
    node = context.cluster.nodes.get(query.node)
    if node is None:
        return Page(title=f"Node {query.node}", content=(missing(query.node),), found=False)
    content = (
        _facts(node),
        section("Agents", show(_agents(), node.agents, query, elements=_AGENT_ELEMENTS, limit=_MAX_ROWS)),
        _resources(node, query),
        _devices(context, node, query),
        *_others(context, node, query),
        grafana_link(context, node),
    )
    return Page(title=f"Node {node.name}", content=content)


def missing(node: str) -> Element:
    """The content of a page for a node that does not exist."""
    text = f"The node {node!a} is not known: it does not exist, or has neither a resource of the plugins nor an agent. "
    return element("p", text, element("a", "See all nodes", href="nodes"), ".")


def _facts(node: Node) -> Element:
    pairs = (
        ("Ready", "yes" if node.ready else "no"),
        ("Scheduling", "disabled (cordoned)" if node.cordoned else "enabled"),
        ("Source of the numbers", "agents" if node.units else "API server; the devices are not known"),
    )
    return facts("Node", pairs, block="node")


def _agents() -> Table[Agent]:
    return Table(
        screen="node",
        caption="Agents",
        columns=(
            Column("pod", "Pod", lambda each: each.pod),
            Column("program", "Program", lambda each: each.name),
            Column("version", "Version", lambda each: each.version),
            Column("state", "State", _agent_state, lambda each: alert(
                _agent_state(each), bad=each.state in ("stale", "invalid"))),
            # A connected agent sends changes only: the time of its last one would look like the age of its inventory.
            Column("inventory", "Inventory", lambda each: each.answered, lambda each: (
                "current" if each.state == "connected" else moment(each.answered)), "time"),
            Column("holders", "Holders", _holders_source),
        ),
        key=lambda each: each.pod,
        name="agents",
        empty="No agent with pages runs on this node. The numbers are those of the API server.",
        noun="agent",
    )  # fmt: skip


def _agent_state(agent: Agent) -> str:
    return f"{agent.state}: {agent.problem}" if agent.problem else agent.state


def _holders_source(agent: Agent) -> str:
    source = agent.holders_source
    return f"from {source}, {agent.holders_age:.0f} s old when sent" if source else "not known"


def _resources(node: Node, query: Query) -> Element:
    def failed(each: NodeResource) -> bool:
        return each.stage not in ("", REGISTERED)

    def known(each: NodeResource, number: int) -> int | None:
        return number if allocation(node, each).known else None

    table = Table[NodeResource](
        screen="node",
        caption="Resources",
        columns=(
            Column("name", "Resource", lambda each: each.name),
            Column("stage", "Stage", lambda each: each.stage or "no agent", lambda each: alert(
                each.stage or "no agent", bad=failed(each))),
            Column("ids", "IDs", lambda each: allocation(node, each).ids, kind="number"),
            Column("healthy", "Healthy", lambda each: allocation(node, each).healthy, kind="number"),
            Column("held", "Held", lambda each: known(each, allocation(node, each).allocated), kind="number"),
            Column("free", "Free", lambda each: known(each, allocation(node, each).free), kind="number"),
            Column("allocatable", "Allocatable", lambda each: each.allocatable, kind="number"),
            Column("problem", "Problem", lambda each: each.problem),
        ),
        key=lambda each: each.name,
        name="resources",
        empty="The node has no resource of the plugins.",
        noun="resource",
    )  # fmt: skip
    failed_first = sorted(node.resources, key=lambda each: not failed(each))
    content = show(table, failed_first, query, elements=_RESOURCE_ELEMENTS, limit=_MAX_ROWS)
    if any(not allocation(node, each).known for each in node.resources):
        note = element("p", "Held and free IDs are not known without an agent.", class_="quiet")
        return section("Resources", content, note)
    return section("Resources", content)


def _devices(context: Context, node: Node, query: Query) -> Element:
    empty = "No agent reports the devices of this node."
    table = device_table(context, "node", name="devices", empty=empty, of_node=True)
    rows = (Device(node, unit) for unit in sorted(node.units, key=urgency))
    return section("Devices", show(table, rows, query, elements=_DEVICE_ELEMENTS, limit=_MAX_ROWS))


def holder_table(context: Context, screen_name: ScreenName, caption: str, empty: str) -> Table[Holder]:
    """A table of holders, the names of which are shown if they may be seen."""
    return Table(
        screen=screen_name,
        caption=caption,
        columns=(
            Column("pod", "Pod", lambda each: pod_text(context, each.namespace, each.pod),
                   lambda each: pod_name(context, each.namespace, each.pod)),
            Column("container", "Container", lambda each: (
                each.container if context.visible(each.namespace) else "hidden")),
            Column("resource", "Resource", lambda each: (
                f"{each.resource} ({each.via.upper()})" if each.via else each.resource)),
            Column("ids", "IDs", lambda each: each.count, kind="number"),
            Column("since", "Since", lambda each: each.since, kind="time"),
        ),
        key=lambda each: (
            f"{each.namespace}/{each.pod}/{each.container}/{each.resource}" if context.visible(each.namespace) else ""
        ),
        name="holders",
        empty=empty,
        noun="holder",
    )  # fmt: skip


def _others(context: Context, node: Node, query: Query) -> Iterator[Element]:
    if not node.units:
        empty = f"Not known: {context.holders_problem}" if context.holders is None else "No container requests any."
        table = holder_table(context, "node", "Containers that request resources", empty)
        note = element("p", "From the pods of the API server: what they request, not which devices they have.")
        found = context.holders or ()
        yield section("Holders", note, show(table, found, query, elements=_DEVICE_ELEMENTS, limit=_MAX_ROWS))
    if node.skipped:
        skipped = Table[SkippedHardware](
            screen="node",
            caption="Hardware that is not advertised",
            columns=(
                Column("hardware", "Hardware", lambda each: each.subject),
                Column("plugin", "Plugin", lambda each: each.plugin),
                Column("reason", "Why", lambda each: each.reason),
            ),
            key=lambda each: f"{each.plugin} {each.subject}",
            name="skipped",
            noun="finding",
        )
        rows = show(skipped, node.skipped, query, elements=_SKIPPED_ELEMENTS, limit=_MAX_ROWS)
        yield section("Hardware that is not advertised", rows)
    labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())[:100])
    if labels:
        yield element("details", element("summary", "Labels"), element("p", labels, class_="long"))
