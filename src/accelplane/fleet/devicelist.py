"""The devices of a cluster as JSON: `/api/v1/devices` of the fleet page, read by `accelplane inspect --fleet`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from accelplane.report.inventory import Holder, ReportedUnit

from .model import Cluster, DevicePlugin, Node

# 5,000 nodes with 8 devices are about 20 MB.
MAX_BYTES = 128 * 1024 * 1024
PATH = "/api/v1/devices"
HIDDEN = "hidden"

_Count = Annotated[int, Meta(ge=0)]
State = Literal["healthy", "suspect", "unhealthy", "recovering", "unknown"]


class DeviceItem(Struct, frozen=True, kw_only=True, rename="camel"):
    """A unit of a node. `ids` has the number of IDs by resource, times are Unix times, 0 if not known.

    Names of holders are `hidden` from a viewer without the right to get the pod.
    """

    node: str
    plugin: str
    unit: str
    device: str = ""
    bdf: str = ""
    model: str = ""
    numa: int | None = None
    state: State = "healthy"
    reason: str = ""
    text: str = ""
    state_since: float = 0.0
    current: bool = True
    ids: Mapping[str, _Count] = {}
    holders: tuple[Holder, ...] = ()


class NodeProblem(Struct, frozen=True, kw_only=True, rename="camel"):
    """A node whose devices are not known, or not the current ones."""

    node: str
    problem: str


class FleetDeviceList(Struct, frozen=True, kw_only=True, rename="camel"):
    """The devices of all nodes, and the nodes without current ones. `problem` is that of the API server.

    The list of all nodes has the device plugin resources of the operator too, those with problems first;
    `more_device_plugins` is the number of those that are left out.
    """

    api_version: Literal["accelplane/v1"] = "accelplane/v1"
    kind: Literal["FleetDeviceList"] = "FleetDeviceList"
    generation: int = 0
    problem: str = ""
    devices: tuple[DeviceItem, ...] = ()
    problems: tuple[NodeProblem, ...] = ()
    device_plugins: tuple[DevicePlugin, ...] = ()
    more_device_plugins: _Count = 0


def device_list(
    cluster: Cluster,
    visible: Callable[[str], bool],
    *,
    node: str = "",
    select: Callable[[Node], Iterable[ReportedUnit]] = lambda node: node.units,
) -> FleetDeviceList:
    """The devices of one node or all. `visible` returns whether names in a namespace may be shown.

    `select` returns the listed devices of a node.
    """
    nodes = [each for name, each in sorted(cluster.nodes.items()) if node in ("", name)]
    return FleetDeviceList(
        generation=cluster.generation,
        problem=cluster.problem,
        devices=tuple(item for each in nodes for item in _devices(each, select(each), visible)),
        problems=tuple(
            NodeProblem(node=each.name, problem=problem) for each in nodes for problem in node_problems(each)
        ),
        device_plugins=() if node else cluster.device_plugins,
        more_device_plugins=0 if node else cluster.more_device_plugins,
    )


def decode(content: bytes) -> FleetDeviceList:
    """Raises `ValueError` for a text that is not a list of devices."""
    try:
        return msgspec.json.decode(content, type=FleetDeviceList)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a list of devices: {error}") from None


def node_problems(node: Node) -> Iterator[str]:
    """Why the devices of a node are not known, or may be outdated."""
    if not node.agents:
        yield "no agent with pages"
    for agent in node.agents:
        if agent.state != "connected":
            yield f"agent {agent.pod}: {agent.state}" + (f": {agent.problem}" if agent.problem else "")


def _devices(node: Node, units: Iterable[ReportedUnit], visible: Callable[[str], bool]) -> Iterator[DeviceItem]:
    current = all(agent.state == "connected" for agent in node.agents)
    for unit in sorted(units, key=lambda unit: (unit.plugin, unit.unit)):
        yield DeviceItem(
            node=node.name,
            plugin=unit.plugin,
            unit=unit.unit,
            device=unit.device,
            bdf=unit.bdf,
            model=unit.model,
            numa=unit.numa,
            state=unit.phase if unit.known or unit.phase != "healthy" else "unknown",
            reason=unit.reason,
            text=unit.text,
            state_since=unit.since,
            current=current,
            ids=dict(unit.ids),
            holders=tuple(_shown(holder, visible) for holder in unit.holders),
        )


def _shown(holder: Holder, visible: Callable[[str], bool]) -> Holder:
    if visible(holder.namespace):
        return holder
    return msgspec.structs.replace(holder, namespace=HIDDEN, pod=HIDDEN, container=HIDDEN)
