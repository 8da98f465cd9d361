"""The pods that hold devices, and how long each has been idle."""

from collections.abc import Sequence

from msgspec import Struct

from accelplane.report.inventory import Holder

from .devices import Device, busy_column, selected
from .html import Element, element
from .page import HIDDEN, Context, Page, device_link, empty_list, filters, node_link, pod_name, pod_text
from .query import Query
from .summaries import is_idle
from .table import Column, Listing, Table, age_column, arranged, show_part

_MAX_NAMES = 6


class HoldingPod(Struct):
    """A pod with its devices. It is idle since the last one of them is, if all are."""

    namespace: str
    pod: str
    node: str
    devices: list[Device] = []
    holders: list[Holder] = []

    @property
    def idle_since(self) -> float:
        units = [each.unit for each in self.devices]
        return max(unit.idle_since for unit in units) if all(map(is_idle, units)) else 0.0

    @property
    def since(self) -> float:
        return min((each.since for each in self.holders if each.since), default=0.0)


def screen(context: Context, query: Query) -> Page:
    """The pods with devices that match the filters: the longest idle ones first."""
    found, problem = selected(context, query)
    pods = sorted(holding_pods(found), key=lambda each: (each.idle_since or context.now, each.since))
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
            pod = found.setdefault(key, HoldingPod(*key)) if key not in found else found[key]
            if not pod.devices or pod.devices[-1].unit is not device.unit:
                pod.devices.append(device)
            pod.holders.append(holder)
    return list(found.values())


def pod_table(context: Context, empty: str, *, name: str = "rows", search: bool = False) -> Table[HoldingPod]:
    """A table of pods that hold devices."""
    return Table(
        screen="search" if search else "pods",
        caption="Pods with devices",
        columns=(
            Column("pod", "Pod", lambda each: pod_text(context, each.namespace, each.pod),
                   lambda each: pod_name(context, each.namespace, each.pod)),
            Column("node", "Node", lambda each: each.node, lambda each: node_link(each.node)),
            Column("devices", "Devices", lambda each: len(each.devices), _devices, "number"),
            Column("ids", "IDs", lambda each: sum(holder.count for holder in each.holders), kind="number"),
            Column("resources", "Resources", lambda each: ", ".join(
                sorted({holder.resource for holder in each.holders}))),
            Column("held_since", "Held since", lambda each: each.since, kind="time"),
            age_column("idle_seconds", "Idle", lambda each: each.idle_since, context.now),
            Column("idle_devices", "Idle devices", lambda each: sum(is_idle(device.unit) for device in each.devices),
                   kind="number"),
            busy_column(context, lambda each: each.devices),
        ),
        key=lambda each: (
            f"{each.namespace}/{each.pod} {each.node}" if context.visible(each.namespace) else HIDDEN
        ),
        name=name,
        empty=empty,
        noun="pod",
    )  # fmt: skip


def _devices(each: HoldingPod) -> Element:
    links: list[Element | str] = []
    for device in each.devices[:_MAX_NAMES]:
        unit = device.unit
        links += [*([", "] if links else []), element("a", unit.unit, href=device_link(device.node.name, unit))]
    rest = len(each.devices) - _MAX_NAMES
    return element("td", *links, f" and {rest} more" if rest > 0 else None, class_="long")
