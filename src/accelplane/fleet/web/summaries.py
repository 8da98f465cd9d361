"""What screens need of each node, computed once per node of a snapshot.

Snapshots share the nodes that have not changed, so of 5,000 nodes only the changed ones are summarized again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from accelplane.report.inventory import ReportedUnit

from ..arithmetic import allocation, without_enclave
from ..families import family_of
from ..model import Cluster, Node

State = Literal["healthy", "suspect", "unhealthy", "recovering", "unknown"]
STATES: tuple[State, ...] = ("healthy", "suspect", "unhealthy", "recovering", "unknown")

REGISTERED = "registered"
_SILENT = ("stale", "invalid", "connecting")


class Problem(Struct, frozen=True):
    """A problem that needs an administrator. The smallest `rank` is the most urgent."""

    rank: int
    node: str
    text: str
    plugin: str = ""
    unit: str = ""
    since: float = 0.0


class Summary(Struct, frozen=True):
    """A node in the list of nodes. `rank` is that of its most urgent problem; `free` are IDs.

    `states` are those of its devices, `node_states` its own. `namespaces` have pods with devices of the node.
    """

    node: Node
    families: frozenset[str]
    states: frozenset[str]
    node_states: frozenset[str]
    models: frozenset[str]
    namespaces: frozenset[str]
    problems: tuple[Problem, ...]
    rank: int
    free: int
    ids: int
    devices: int
    held: int
    unhealthy: int


class Totals(Struct, frozen=True):
    """The numbers of the cluster."""

    nodes: int = 0
    devices: int = 0
    held: int = 0
    unhealthy: int = 0
    silent: int = 0
    waiting: int = 0


class Summaries:
    """The summaries of the current nodes."""

    def __init__(self) -> None:
        self._known: dict[str, Summary] = {}
        self._nodes: Mapping[str, Node] = {}

    def of(self, cluster: Cluster) -> Mapping[str, Summary]:
        """The summaries of all nodes."""
        if cluster.nodes is not self._nodes:
            known = self._known
            self._known = {
                name: found if (found := known.get(name)) is not None and found.node is node else summarize(node)
                for name, node in cluster.nodes.items()
            }
            self._nodes = cluster.nodes
        return self._known


def totals(cluster: Cluster, summaries: Mapping[str, Summary]) -> Totals:
    """The numbers of the cluster."""
    each = summaries.values()
    return Totals(
        nodes=len(summaries),
        devices=sum(one.devices for one in each),
        held=sum(one.held for one in each),
        unhealthy=sum(one.unhealthy for one in each),
        silent=sum("unanswered" in one.node_states for one in each),
        waiting=len(cluster.waiting),
    )


def state_of(unit: ReportedUnit) -> State:
    """The state of a device as it is shown: its phase, or that its health is not known."""
    return unit.phase if unit.known or unit.phase != "healthy" else "unknown"


def states_of(unit: ReportedUnit) -> tuple[str, ...]:
    """The values of the state filter that select a device. A recovering one is still counted as unhealthy."""
    state = state_of(unit)
    held = ("held", "idle") if is_idle(unit) else ("held",) if unit.holders else ("unheld",)
    return (state, "unhealthy", *held) if state == "recovering" else (state, *held)


def is_idle(unit: ReportedUnit) -> bool:
    """Whether a device is held and does nothing."""
    return bool(unit.holders and unit.idle_since)


def held_share(unit: ReportedUnit) -> float:
    """The part of a device's IDs that is held, from 0 to 1; with several resources that of the most used one.

    A claim has the whole device.
    """
    if not unit.holders:
        return 0.0
    if any(holder.via for holder in unit.holders):
        return 1.0
    counts: dict[str, int] = {}
    for holder in unit.holders:
        counts[holder.resource] = counts.get(holder.resource, 0) + holder.count
    shares = [min(1.0, counts.get(name, 0) / ids) for name, ids in unit.ids.items() if ids]
    return max(shares, default=1.0)


def summarize(node: Node) -> Summary:
    """The summary of a node."""
    numbers = [allocation(node, resource) for resource in node.resources]
    problems = tuple(sorted(_problems(node), key=lambda problem: problem.rank))
    return Summary(
        node=node,
        families=frozenset(family_of(resource.name) for resource in node.resources)
        | frozenset(family_of(name) for unit in node.units for name in unit.ids),
        states=frozenset(state for unit in node.units for state in states_of(unit)),
        node_states=frozenset(_states(node)),
        models=frozenset(unit.model for unit in node.units if unit.model),
        namespaces=frozenset(holder.namespace for unit in node.units for holder in unit.holders)
        | frozenset(holder.namespace for holder in node.holders),
        problems=problems,
        rank=problems[0].rank if problems else 9,
        free=sum(each.free for each in numbers) if node.ready and not node.cordoned else 0,
        ids=sum(each.ids for each in numbers),
        devices=len(node.units),
        held=sum(bool(unit.holders) for unit in node.units),
        unhealthy=sum(unit.phase in ("unhealthy", "recovering") for unit in node.units),
    )


def _states(node: Node) -> Iterator[str]:
    if not node.agents:
        yield "no-agent"
    if any(agent.state in _SILENT for agent in node.agents):
        yield "unanswered"
    if any(resource.stage not in ("", REGISTERED) for resource in node.resources):
        yield "unregistered"
    if node.cordoned:
        yield "cordoned"
    if not node.ready:
        yield "not-ready"


def _problems(node: Node) -> Iterator[Problem]:
    for unit in node.units:
        yield from _unit_problems(node, unit)
    for resource in node.resources:
        if resource.stage not in ("", REGISTERED):
            why = f": {resource.problem}" if resource.problem else ""
            yield Problem(2, node.name, f"{resource.name} is not registered at the kubelet ({resource.stage}){why}")
    for agent in node.agents:
        if agent.state in _SILENT:
            text = f"agent {agent.pod} is {_WORDS[agent.state]}" + (f": {agent.problem}" if agent.problem else "")
            yield Problem(3 if agent.state != "connecting" else 5, node.name, text, since=agent.answered)
    if pods := without_enclave(node):
        found = "1 pod requests" if len(pods) == 1 else f"{len(pods)} pods request"
        text = f"{found} sgx.intel.com/epc without an enclave: the SGX webhook was not reachable"
        yield Problem(2, node.name, text)
    if not node.ready:
        yield Problem(4, node.name, "the node is not ready")


_WORDS = {"stale": "not answering", "invalid": "answering wrongly", "connecting": "not connected yet"}


def _unit_problems(node: Node, unit: ReportedUnit) -> Iterator[Problem]:
    if unit.phase == "healthy":
        if unit.known and unit.reason:
            text = f"{unit.plugin} {unit.unit} has a warning ({unit.reason})"
            yield Problem(6, node.name, text, unit.plugin, unit.unit)
        return
    reason = unit.reason or "no reason given"
    rank = {"unhealthy": 0 if unit.holders else 1, "recovering": 5}.get(unit.phase, 6)
    pods = _pods(unit.holders)
    text = f"{unit.plugin} {unit.unit} is {unit.phase} ({reason})" + (f", held by {pods}" if pods else "")
    yield Problem(rank, node.name, text, unit.plugin, unit.unit, unit.since)


def _pods(holders: Sequence[object]) -> str:
    """How many containers hold a device; their names are shown where they may be seen."""
    return "" if not holders else "1 container" if len(holders) == 1 else f"{len(holders)} containers"
