"""One node: its resources, devices, agents, and hardware that is not used."""

from collections.abc import Sequence

from accelplane.report.inventory import Holder, ReportedUnit

from ..arithmetic import allocation
from ..model import Agent, Node, Resource
from .html import Element, element
from .page import Context, Page, badge, device_link, facts, moment, more, number, numeric, part, pod_name, row, table
from .query import PlaceQuery
from .summaries import REGISTERED

_MAX_ROWS = 200
# Limits of the elements of each table. The page has at most 2,500.
_AGENT_ELEMENTS = 200
_RESOURCE_ELEMENTS = 500
_DEVICE_ELEMENTS = 1100
_SKIPPED_ELEMENTS = 400
_MAX_NAMES = 4


def screen(context: Context, query: PlaceQuery) -> Page:
    """The node of the query."""
    node = context.cluster.nodes.get(query.node)
    if node is None:
        return Page(title=f"Node {query.node}", content=(missing(query.node),), found=False)
    return Page(
        title=f"Node {node.name}",
        content=(_facts(node), _agents(node), _resources(node), _devices(context, node), *_others(context, node)),
    )


def missing(node: str) -> Element:
    """The content of a page for a node that does not exist."""
    text = f"The node {node!a} is not known: it does not exist, or has neither a resource of the plugins nor an agent. "
    return element("p", text, element("a", "See all nodes", href="nodes"), ".")


def _facts(node: Node) -> Element:
    return facts(
        "Node",
        (
            ("Ready", "yes" if node.ready else "no"),
            ("Scheduling", "disabled (cordoned)" if node.cordoned else "enabled"),
            ("Source of the numbers", "agents" if node.units else "API server; the devices are not known"),
        ),
        block="node",
    )


def _agents(node: Node) -> Element:
    headers = ("Pod", "Program", "Version", "State", "Inventory", "Holders")
    rows = part(map(_agent, node.agents), elements=_AGENT_ELEMENTS, limit=_MAX_ROWS)
    return element(
        "section",
        element("h2", "Agents"),
        table(
            "Agents", headers, rows, block="agents",
            empty="No agent with pages runs on this node. The numbers are those of the API server.",
        ),
        more("agents", len(node.agents) - len(rows), noun="agent"),
    )  # fmt: skip


def _agent(agent: Agent) -> Element:
    source = f"from {agent.holders_source}" if agent.holders_source else "not known"
    age = f", {agent.holders_age:.0f} s old when sent" if agent.holders_source else ""
    state = f"{agent.state}: {agent.problem}" if agent.problem else agent.state
    return row(
        agent.pod,
        agent.name,
        agent.version,
        element("td", state, class_="bad" if agent.state in ("stale", "invalid") else None),
        # A connected agent sends changes only: the time of its last one would look like the age of its inventory.
        "current" if agent.state == "connected" else moment(agent.answered),
        source + age,
        head=agent.pod,
    )


def _resources(node: Node) -> Element:
    numbers = (numeric(name) for name in ("IDs", "Healthy", "Held", "Free", "Allocatable"))
    headers = ("Resource", "Stage", *numbers, "Problem")
    failed_first = sorted(node.resources, key=lambda each: each.stage in ("", REGISTERED))
    rows = part((_resource(node, each) for each in failed_first), elements=_RESOURCE_ELEMENTS, limit=_MAX_ROWS)
    return element(
        "section",
        element("h2", "Resources"),
        table("Resources", headers, rows, block="resources", empty="The node has no resource of the plugins."),
        more("resources", len(node.resources) - len(rows), noun="resource"),
    )


def _resource(node: Node, each: Resource) -> Element:
    numbers = allocation(node, each)
    failed = each.stage not in ("", REGISTERED)
    unknown = element("td", "not known", class_="number quiet")
    return row(
        each.name,
        element("td", each.stage or "no agent", class_="bad" if failed else None),
        number(numbers.ids),
        number(numbers.healthy),
        number(numbers.allocated) if numbers.known else unknown,
        number(numbers.free) if numbers.known else unknown,
        number(each.allocatable),
        each.problem,
        head=each.name,
    )


def _devices(context: Context, node: Node) -> Element:
    headers = ("Device", "State", "Since", numeric("Held IDs"), "Holders", "Plugin", "Model", "PCI address", "NUMA")
    problems_first = sorted(node.units, key=_urgency)
    rows = part((_device(context, node, each) for each in problems_first), elements=_DEVICE_ELEMENTS, limit=_MAX_ROWS)
    return element(
        "section",
        element("h2", "Devices"),
        table("Devices", headers, rows, block="devices", empty="No agent reports the devices of this node."),
        more("devices", len(node.units) - len(rows), noun="device"),
    )


def _urgency(unit: ReportedUnit) -> int:
    """The order of devices: those that are unhealthy and held, unhealthy, changing, not known, and the others."""
    if unit.phase == "healthy":
        return 4 if unit.known else 3
    return 2 if unit.phase in ("suspect", "recovering") else 0 if unit.holders else 1


def _device(context: Context, node: Node, unit: ReportedUnit) -> Element:
    ids = sum(unit.ids.values())
    allocated = sum(holder.count for holder in unit.holders)
    reason = f" ({unit.reason})" if unit.reason and unit.phase != "healthy" else ""
    return row(
        f"{unit.plugin} {unit.unit}",
        element("td", badge(unit), reason),
        element("td", moment(unit.since)),
        element("td", f"{allocated} of {ids}", class_="number"),
        element("td", *_names(context, unit.holders)),
        unit.plugin,
        unit.model or "-",
        unit.bdf or "-",
        "-" if unit.numa is None or unit.numa < 0 else str(unit.numa),
        head=element("a", unit.unit, href=device_link(node.name, unit)),
    )


def _names(context: Context, holders: Sequence[Holder]) -> list["Element | str"]:
    pods = dict.fromkeys((holder.namespace, holder.pod) for holder in holders)
    names: list[Element | str] = []
    for namespace, pod in list(pods)[:_MAX_NAMES]:
        names += [*([", "] if names else []), pod_name(context, namespace, pod)]
    if len(pods) > _MAX_NAMES:
        names.append(f" and {len(pods) - _MAX_NAMES} more")
    return names or ["-"]


def holder_row(context: Context, holder: Holder) -> Element:
    """A row of a table of holders."""
    shown = context.visible(holder.namespace)
    return row(
        f"{holder.namespace}/{holder.pod}/{holder.container}/{holder.resource}" if shown else "",
        holder.container if shown else "hidden",
        f"{holder.resource} ({holder.via.upper()})" if holder.via else holder.resource,
        number(holder.count),
        element("td", moment(holder.since)),
        head=pod_name(context, holder.namespace, holder.pod),
    )


HOLDER_HEADERS = ("Pod", "Container", "Resource", numeric("IDs"), "Since")


def _others(context: Context, node: Node) -> list[Element]:
    others: list[Element] = []
    if not node.units:
        found = context.holders or ()
        rows = numbered(part((holder_row(context, each) for each in found), elements=_DEVICE_ELEMENTS, limit=_MAX_ROWS))
        empty = f"Not known: {context.holders_problem}" if context.holders is None else "No container requests any."
        holders = table("Containers that request resources", HOLDER_HEADERS, rows, block="holders", empty=empty)
        note = "From the pods of the API server: what they request, not which devices they have."
        rest = more("holders", len(found) - len(rows), noun="holder")
        others.append(element("section", element("h2", "Holders"), element("p", note), holders, rest))
    if node.skipped:
        skipped = (
            row(f"{each.plugin} {each.subject}", each.plugin, each.reason, head=each.subject) for each in node.skipped
        )
        rows = part(skipped, elements=_SKIPPED_ELEMENTS, limit=_MAX_ROWS)
        hardware = table(
            "Hardware that is not advertised", ("Hardware", "Plugin", "Why"), rows, block="skipped", empty=""
        )
        rest = more("skipped", len(node.skipped) - len(rows), noun="finding")
        others.append(element("section", element("h2", "Hardware that is not advertised"), hardware, rest))
    labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())[:100])
    if labels:
        others.append(element("details", element("summary", "Labels"), element("p", labels, class_="long")))
    return others


def numbered(rows: Sequence[Element]) -> list[Element]:
    """The rows with keys that are different also where names are hidden."""
    return [
        Element(each.tag, {**each.attributes, "data-key": f"{index} {each.attributes['data-key']}"}, each.children)
        for index, each in enumerate(rows)
    ]
