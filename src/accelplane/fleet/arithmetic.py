"""What follows from a snapshot: the rows of the overview, why a pod waits, and what namespaces hold.

Pure functions of `Cluster`. Numbers of a resource come from the agent. Without a responding agent they come from the
Node status, and allocations are known only with `-pods=all`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from accelplane.report.inventory import ReportedUnit

from .families import family_of
from .model import Cluster, Node, NodeResource, Quota, Waiting

_REGISTERED = "registered"
_EPC, _ENCLAVE = "sgx.intel.com/epc", "sgx.intel.com/enclave"


class Overview(Struct, frozen=True):
    """All of one resource in a cluster. `ids` to `free` are IDs; `unhealthy`, `unknown` and `idle` are units.

    `affected` units are unhealthy and held. `unregistered` nodes have an agent that could not register the resource,
    `unanswered` nodes have an agent that does not answer, `estimated` nodes have no known allocation.
    """

    family: str
    resource: str
    nodes: int = 0
    units: int = 0
    ids: int = 0
    allocated: int = 0
    free: int = 0
    unhealthy: int = 0
    affected: int = 0
    unknown: int = 0
    idle: int = 0
    unregistered: int = 0
    unanswered: int = 0
    estimated: int = 0

    @property
    def has_problem(self) -> bool:
        return bool(self.unhealthy or self.unregistered or self.unanswered)


class Supply(Struct):
    """What there is of a resource for pods that wait, in IDs.

    `free` is on nodes that accept pods, `most_free` on the one of these with the most. The others are not free for
    the reason of their name; `unready` are on nodes that are not ready. `estimated` nodes have no known allocation:
    what is healthy there counts as free, but not in `free_by_node`. `closed_by_node` are cordoned or not ready.
    """

    free: int = 0
    most_free: int = 0
    most_free_node: str = ""
    allocated: int = 0
    unhealthy: int = 0
    cordoned: int = 0
    unready: int = 0
    unregistered: int = 0
    estimated: int = 0
    free_by_node: dict[str, int] = {}
    closed_by_node: dict[str, int] = {}


class Shortage(Struct, frozen=True):
    """The cause of a waiting pod: requested and free IDs of a resource.

    `quota_left` is None without a quota. The pod is part of what the quota counts, because it exists.
    """

    namespace: str
    pod: str
    resource: str
    requested: int
    supply: Supply
    quota_left: int | None = None

    @property
    def fits(self) -> bool:
        """Whether one node has enough; then something else is missing: memory, a toleration, another resource."""
        return any(free >= self.requested for free in self.supply.free_by_node.values())


class NamespaceUse(Struct, frozen=True):
    """The IDs of a resource that a namespace holds. `share` is relative to all IDs, `idle` the IDs of idle units.

    `device_hours` are since the start of the server; a holder of 2 of 8 IDs of a unit uses a quarter of it.
    """

    namespace: str
    resource: str
    ids: int
    share: float
    idle: int
    device_hours: float


class Allocation(Struct, frozen=True):
    """The numbers of a resource of a node. Without `known`, `allocated` is 0 because it is not known."""

    ids: int
    healthy: int
    allocated: int
    known: bool

    @property
    def free(self) -> int:
        return max(0, self.healthy - self.allocated)


def allocation(node: Node, resource: NodeResource) -> Allocation:
    """The numbers of an agent, or those of the Node status."""
    if resource.stage:
        return Allocation(resource.ids, resource.healthy, resource.allocated, known=True)
    allocated = sum(holder.count for holder in node.holders if holder.resource == resource.name)
    return Allocation(
        resource.capacity, resource.allocatable, allocated, known=node.holders_known or bool(node.holders)
    )


def overview(cluster: Cluster) -> tuple[Overview, ...]:
    """A row for each resource: those with problems first, then by family and name."""
    counts: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for node in cluster.nodes.values():
        silent = any(agent.state in ("stale", "invalid", "connecting") for agent in node.agents)
        for resource in node.resources:
            row, numbers = counts[resource.name], allocation(node, resource)
            row["nodes"] += 1
            row["ids"] += numbers.ids
            row["allocated"] += numbers.allocated
            row["free"] += numbers.free
            row["estimated"] += not numbers.known
            row["unanswered"] += silent
            row["unregistered"] += resource.stage not in ("", _REGISTERED)
        for unit in node.units:
            for resource in unit.ids:
                _count_unit(counts[resource], unit)
    rows = [Overview(family_of(name), name, **row) for name, row in counts.items()]
    return tuple(sorted(rows, key=lambda row: (not row.affected, not row.has_problem, row.family, row.resource)))


def supplies(cluster: Cluster) -> Mapping[str, Supply]:
    """What there is of each resource for pods that wait."""
    found: defaultdict[str, Supply] = defaultdict(Supply)
    for node in cluster.nodes.values():
        for resource in node.resources:
            supply, numbers = found[resource.name], allocation(node, resource)
            supply.allocated += numbers.allocated
            supply.unhealthy += max(0, numbers.ids - numbers.healthy)
            supply.estimated += not numbers.known
            if resource.stage not in ("", _REGISTERED):
                supply.unregistered += numbers.free
            elif node.cordoned or not node.ready:
                supply.cordoned += numbers.free if node.cordoned else 0
                supply.unready += 0 if node.cordoned else numbers.free
                if numbers.known:
                    supply.closed_by_node[node.name] = numbers.free
            else:
                supply.free += numbers.free
                if numbers.known:
                    supply.free_by_node[node.name] = numbers.free
                if numbers.free > supply.most_free:
                    supply.most_free, supply.most_free_node = numbers.free, node.name
    return found


def shortages(cluster: Cluster) -> tuple[Shortage, ...]:
    """The shortages of each waiting pod, oldest first."""
    supply_by_resource = supplies(cluster)
    left = _quota_left(cluster.quotas)
    return tuple(
        Shortage(
            pod.namespace,
            pod.name,
            resource,
            requested,
            supply_by_resource.get(resource) or Supply(),
            left.get((pod.namespace, resource)),
        )
        for pod in oldest_first(cluster.waiting)
        for resource, requested in sorted(pod.requests.items())
    )


def oldest_first(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Waiting pods in the order of their creation."""
    return sorted(waiting, key=lambda pod: (pod.since, pod.namespace, pod.name))


def candidates(causes: Sequence[Shortage], *, closed: bool) -> Sequence[str]:
    """The nodes with enough of everything that a pod requests; if `closed`, also cordoned and unready ones."""
    free = [each.supply.free_by_node | (each.supply.closed_by_node if closed else {}) for each in causes]
    return [
        node
        for node in min(free, key=len, default=())
        if all(numbers.get(node, 0) >= each.requested for numbers, each in zip(free, causes, strict=True))
    ]


def explain(shortage: Shortage, *, together: bool = True) -> str:
    """The numbers of a shortage as sentences. `together`: one node has enough of all that the pod requests."""
    supply = shortage.supply
    words = [f"Requests {shortage.requested:,} of {shortage.resource}."]
    others = [
        (supply.unhealthy, "unhealthy"),
        (supply.cordoned, "on cordoned nodes"),
        (supply.unready, "on nodes that are not ready"),
        (supply.unregistered, "on nodes whose agent is not registered"),
    ]
    counted = [f"{count:,} {where}" for count, where in others if count]
    if not (supply.free or supply.allocated or counted):
        words.append("No node has any.")
    else:
        at = f", on {supply.most_free_node}" if supply.most_free_node else ""
        words.append(f"{supply.free:,} free in the cluster, at most {supply.most_free:,} on one node{at}.")
    if counted:
        words.append(f"Not usable: {', '.join(counted)}.")
    if shortage.quota_left is not None:
        words.append(f"The quota of the namespace leaves {shortage.quota_left:,} for other pods.")
    if supply.estimated:
        nodes = "1 node" if supply.estimated == 1 else f"{supply.estimated} nodes"
        words.append(f"The allocation is not known on {nodes}.")
    if shortage.fits and together:
        words.append("Enough is free on one node: the pod waits for something else.")
    elif shortage.fits:
        words.append("Enough is free on one node, but no node has enough of all requested resources.")
    elif shortage.requested <= supply.most_free:
        words.append("Enough may be free on a node whose allocation is not known.")
    return " ".join(words)


def namespaces(cluster: Cluster, now: float) -> tuple[NamespaceUse, ...]:
    """What each namespace holds now, or has held since the start, by namespace and resource."""
    ids: defaultdict[tuple[str, str], int] = defaultdict(int)
    idle: defaultdict[tuple[str, str], int] = defaultdict(int)
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    totals: defaultdict[str, int] = defaultdict(int)
    for node in cluster.nodes.values():
        for resource in node.resources:
            totals[resource.name] += allocation(node, resource).ids
        for key, share in device_shares(node).items():
            shares[key] += share
        for holder in node.holders:
            ids[holder.namespace, holder.resource] += holder.count
        for unit in node.units:
            for holder in unit.holders:
                ids[holder.namespace, holder.resource] += holder.count
                if unit.idle_since:
                    idle[holder.namespace, holder.resource] += holder.count
    since = max(0.0, now - cluster.time)
    return tuple(
        NamespaceUse(
            *key,
            ids=ids[key],
            share=min(1.0, ids[key] / totals[key[1]]) if totals[key[1]] else 0.0,
            idle=idle[key],
            device_hours=(cluster.held_seconds.get(key, 0.0) + shares[key] * since) / 3600,
        )
        for key in sorted(ids.keys() | cluster.held_seconds.keys())
    )


def device_shares(node: Node) -> Mapping[tuple[str, str], float]:
    """How many devices of a node each namespace holds, by namespace and resource."""
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    for holder in node.holders:
        shares[holder.namespace, holder.resource] += holder.count
    for unit in node.units:
        for holder in unit.holders:
            shares[holder.namespace, holder.resource] += holder.count / max(
                1, holder.count, unit.ids.get(holder.resource, 1)
            )
    return shares


def _count_unit(row: defaultdict[str, int], unit: ReportedUnit) -> None:
    unhealthy = unit.phase in ("unhealthy", "recovering")
    row["units"] += 1
    row["unhealthy"] += unhealthy
    row["affected"] += unhealthy and bool(unit.holders)
    row["unknown"] += not unit.known and unit.phase == "healthy"
    row["idle"] += bool(unit.holders and unit.idle_since)


def _quota_left(quotas: Iterable[Quota]) -> Mapping[tuple[str, str], int]:
    """The rest of each resource by the strictest quota of each namespace."""
    left: dict[tuple[str, str], int] = {}
    for quota in quotas:
        key, rest = (quota.namespace, quota.resource), max(0, quota.hard - quota.used)
        left[key] = min(left.get(key, rest), rest)
    return left


def without_enclave(node: Node) -> Sequence[tuple[str, str]]:
    """The pods of the node, namespace and name, that hold EPC memory but no enclave device.

    They were created while the SGX webhook, which adds the device, was not reachable. All pods must be known.
    """
    held: dict[tuple[str, str], set[str]] = defaultdict(set)
    for holder in node.holders:
        held[holder.namespace, holder.pod].add(holder.resource)
    return sorted(pod for pod, resources in held.items() if _EPC in resources and _ENCLAVE not in resources)
