"""The pods that hold devices, and how long each has been idle."""

from collections.abc import Sequence

from msgspec import Struct

from accelplane.report.inventory import Holder

from .devices import Device, busy_column, selected
from .html import Element, element
from .page import HIDDEN, Context, Page, device_link, empty_list, filters, joined, node_link, pod_name, pod_text
from .query import Query
from .summaries import is_idle
from .table import Column, Listing, Table, age_column, arranged, moment, show_part

_MAX_NAMES = 6


class HoldingPod(Struct, gc=False):
    """A pod on a node with its devices."""

    namespace: str
    pod: str
    node: str
    devices: list[Device]

    @property
    def holders(self) -> Sequence[Holder]:
        """Its containers."""
        name = self.namespace, self.pod
        found = (holder for each in self.devices for holder in each.unit.holders)
        return [each for each in found if (each.namespace, each.pod) == name]

    @property
    def since(self) -> float:
        """When the first of its containers began to hold a device, 0 if unknown."""
        return min((each.since for each in self.holders if each.since), default=0.0)

    @property
    def idle_since(self) -> float:
        """When the last of its devices became idle, 0 while one works."""
        latest = 0.0
        for each in self.devices:
            if not each.unit.idle_since:
                return 0.0
            latest = max(latest, each.unit.idle_since)
        return latest


def screen(context: Context, query: Query) -> Page:
    """The pods with devices that match the filters: the longest idle ones first."""
    found, problem = selected(context, query)
    pods = sorted(holding_pods(found), key=lambda each: each.idle_since or context.now)
    table = pod_table(context, empty_list(query, "pod", "No pod holds a device."))
    listing = Listing(table, arranged(table, pods, query))
    form = filters(context, "pods", query, problem=problem)
    return Page(title="Pods with devices", content=(form, *show_part(listing, query)), listing=listing)


def holding_pods(devices: Sequence[Device]) -> Sequence[HoldingPod]:
    """The pods that hold some of the devices."""
    found: dict[tuple[str, str, str], HoldingPod] = {}
    for device in devices:
        for holder in device.unit.holders:
            key = holder.namespace, holder.pod, device.node.name
            pod = found.get(key)
            if pod is None:
                found[key] = HoldingPod(*key, [device])
            elif pod.devices[-1] is not device:
                pod.devices.append(device)
    return list(found.values())


def pod_table(context: Context, empty: str, *, name: str = "rows", search: bool = False) -> Table[HoldingPod]:
    """A table of pods that hold devices."""
    return Table(
        screen="search" if search else "pods",
        caption="Pods with devices",
        columns=(
            Column("pod", "Pod", lambda each: pod_text(context, each.namespace, each.pod),
                   lambda each: pod_name(context, each.namespace, each.pod)),
            age_column("idle_seconds", "Idle", lambda each: each.idle_since, context.now),
            Column("node", "Node", lambda each: each.node, lambda each: node_link(each.node)),
            Column("devices", "Devices", lambda each: len(each.devices), _devices, "number"),
            Column("ids", "IDs", lambda each: sum(holder.count for holder in each.holders), kind="number"),
            Column("held_since", "Held for", lambda each: each.since,
                   lambda each: moment(each.since, age=True), "time"),
            busy_column(context, lambda each: each.devices),
            Column("idle_devices", "Idle devices", lambda each: sum(is_idle(device.unit) for device in each.devices),
                   kind="number"),
            Column("resources", "Resources", lambda each: ", ".join(
                sorted({holder.resource for holder in each.holders}))),
        ),
        key=lambda each: (
            f"{each.namespace}/{each.pod} {each.node}" if context.visible(each.namespace) else HIDDEN
        ),
        name=name,
        empty=empty,
        noun="pod",
    )  # fmt: skip


def _devices(each: HoldingPod) -> Element:
    links = [element("a", device.unit.unit, href=device_link(device.node.name, device.unit)) for device in each.devices]
    return element("td", *joined(links, _MAX_NAMES), class_="long")
