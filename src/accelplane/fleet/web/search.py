"""One search for nodes, devices and pods."""

from collections.abc import Iterator

from ..model import Node, Waiting
from .devices import Device, device_table
from .html import Element, element
from .page import Context, Page, node_link, section
from .pods import holding_pods, pod_table
from .query import Query, link
from .selection import has_text
from .table import Column, Table, show

_ROWS = 25
_ELEMENTS = 550


def screen(context: Context, query: Query) -> Page:
    """What has the text in its name; of devices also the PCI address, the model and the reason of the state."""
    if not query.text:
        return Page(title="Search", content=(element("p", "Enter a part of a name."),))
    return Page(title=f"Search: {query.text}", content=tuple(_sections(context, query)))


def _sections(context: Context, query: Query) -> Iterator[Element]:
    text = query.text.casefold()
    nodes = [node for node in context.cluster.nodes.values() if text in node.name.casefold()]
    everything = [Device(node, unit) for node in context.cluster.nodes.values() for unit in node.units]
    devices = [each for each in everything if has_text(each.unit, text)]
    pods = [
        each
        for each in holding_pods(everything)
        if text in f"{each.namespace}/{each.pod}".casefold() and context.visible(each.namespace)
    ]
    waiting = [
        each
        for each in context.cluster.waiting
        if text in f"{each.namespace}/{each.name}".casefold() and context.visible(each.namespace)
    ]
    node_table = Table[Node](
        screen="search",
        caption="Nodes",
        columns=(
            Column("name", "Node", lambda each: each.name, lambda each: node_link(each.name)),
            Column("devices", "Devices", lambda each: len(each.units), kind="number"),
        ),
        key=lambda each: each.name,
        name="nodes",
        empty="No node has this name.",
        noun="node",
    )
    waiting_table = Table[Waiting](
        screen="search",
        caption="Waiting pods",
        columns=(
            Column("pod", "Pod", lambda each: f"{each.namespace}/{each.name}", _waiting_link),
            Column("since", "Waits since", lambda each: each.since, kind="time"),
        ),
        key=lambda each: f"{each.namespace}/{each.name}",
        name="waiting",
        empty="No waiting pod has this name.",
        noun="pod",
    )  # fmt: skip
    table = device_table(context, "search", name="devices", empty="No device has this text.")
    own_pods = pod_table(context, "No pod with devices has this name.", name="pods", search=True)
    limits = {"elements": _ELEMENTS, "limit": _ROWS}
    yield section("Nodes", show(node_table, nodes, query, **limits))
    yield section("Devices", show(table, devices, query, **limits))
    yield section("Pods with devices", show(own_pods, pods, query, **limits))
    yield section("Waiting pods", show(waiting_table, waiting, query, **limits))


def _waiting_link(pod: Waiting) -> Element:
    name = f"{pod.namespace}/{pod.name}"
    return element("a", name, href=link("waiting", Query(text=name)))
