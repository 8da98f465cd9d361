"""The parts of nodes, pods and quotas that the fleet reads, and the facts in them.

The caches store only these parts: a complete node is a hundred times as large.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import ClassVar

from msgspec import Struct

from accelplane.kube.interning import StringPool
from accelplane.kube.objects import ApiInfo, GlobalResource, NamespacedResource, OwnerReference, api
from accelplane.kube.quantities import Quantity, number_of

from .agents import Place
from .model import Holder, Quota, Resource, Waiting

AGENT_LABELS: Mapping[str, str] = {
    "app.kubernetes.io/part-of": "accelplane",
    "app.kubernetes.io/component": "agent",
}
AGENT_PORT = "pages"

_MAX_COUNT = 2**53
_MAX_GATES = 16
_MAX_ADDRESS = 64

Known = Callable[[str], bool]


class Metadata(Struct, kw_only=True):
    """The metadata of nodes, pods and quotas that are read."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resourceVersion: str | None = None
    ownerReferences: Sequence[OwnerReference] | None = None
    labels: dict[str, str] | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None


class Condition(Struct):
    """A condition of a node or pod."""

    type: str
    status: str
    message: str | None = None


class NodeSpec(Struct):
    unschedulable: bool | None = None


class NodeStatus(Struct):
    capacity: dict[str, Quantity] | None = None
    allocatable: dict[str, Quantity] | None = None
    conditions: list[Condition] | None = None


class Node(GlobalResource, Struct, kw_only=True):
    """A node."""

    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")
    metadata: Metadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class Port(Struct):
    name: str | None = None
    containerPort: int = 0


class Requirements(Struct):
    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None


class Container(Struct):
    name: str = ""
    ports: list[Port] | None = None
    resources: Requirements | None = None
    restartPolicy: str | None = None


class Gate(Struct):
    name: str = ""


class PodSpec(Struct):
    nodeName: str | None = None
    serviceAccountName: str | None = None
    containers: list[Container] | None = None
    initContainers: list[Container] | None = None
    schedulingGates: list[Gate] | None = None


class PodStatus(Struct):
    phase: str | None = None
    podIP: str | None = None
    startTime: str | None = None
    conditions: list[Condition] | None = None


class Pod(NamespacedResource, Struct, kw_only=True):
    """A pod."""

    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")
    metadata: Metadata
    spec: PodSpec | None = None
    status: PodStatus | None = None


class QuotaStatus(Struct):
    hard: dict[str, Quantity] | None = None
    used: dict[str, Quantity] | None = None


class ResourceQuota(NamespacedResource, Struct, kw_only=True):
    """A quota."""

    _api_info: ClassVar[ApiInfo] = api("", "v1", "ResourceQuota", "resourcequotas")
    metadata: Metadata
    status: QuotaStatus | None = None


class NodeFacts(Struct, frozen=True):
    """The properties of a node from its object."""

    labels: Mapping[str, str]
    ready: bool
    cordoned: bool
    resources: tuple[Resource, ...]


# Transforms of caches


def relevant_node(known: Known) -> Callable[[Node], None]:
    """A transform that removes from a node what `node_facts` does not read."""
    shared = StringPool(50_000)

    def transform(node: Node) -> None:
        node.metadata.labels = {
            shared(name): shared(value) for name, value in (node.metadata.labels or {}).items()
        } or None
        status = node.status
        if status is None:
            return
        for found in (status.capacity, status.allocatable):
            for name in [name for name in found or () if not known(name)]:
                del (found or {})[name]
        ready = [each for each in status.conditions or () if each.type == "Ready"]
        node.status = NodeStatus(status.capacity or None, status.allocatable or None, ready)

    return transform


def relevant_pod(known: Known) -> Callable[[Pod], None]:
    """A transform that removes what neither `waiting_pod` nor `holders_of` reads; everything if the pod requests none.

    Its metadata stay: without them the cache would not know the version.
    """

    def transform(pod: Pod) -> None:
        pod.metadata.labels = pod.metadata.ownerReferences = None
        if not requests_of(pod, known):
            pod.spec = pod.status = None

    return transform


# Facts


def node_facts(node: Node) -> NodeFacts:
    """The facts of a node that went through `relevant_node`."""
    status = node.status or NodeStatus()
    capacity, allocatable = status.capacity or {}, status.allocatable or {}
    ready = next((each for each in status.conditions or () if each.type == "Ready"), None)
    return NodeFacts(
        labels=node.metadata.labels or {},
        ready=ready is not None and ready.status == "True",
        cordoned=bool(node.spec and node.spec.unschedulable),
        resources=tuple(
            Resource(name, capacity=_count(capacity.get(name, 0)), allocatable=_count(allocatable.get(name, 0)))
            for name in sorted(capacity.keys() | allocatable.keys())
            if _count(capacity.get(name, 0)) or _count(allocatable.get(name, 0))
        ),
    )


def agent_identity(pod: Pod) -> tuple[str, str]:
    """The namespace and the service account of an agent's pod. Labels can be set by everyone who creates pods."""
    return pod.metadata.namespace or "", (pod.spec and pod.spec.serviceAccountName) or ""


def agent_place(pod: Pod, *, loopback: bool = False) -> Place | None:
    """Where an agent's pod serves; None if it is not on a node, has ended or ends.

    The kubelet writes the address: that of an attacked node could direct requests to programs in the pod of the fleet,
    or to services of its node. `loopback` permits loopback addresses.
    """
    spec, status = pod.spec or PodSpec(), pod.status or PodStatus()
    ended = status.phase in ("Succeeded", "Failed") or pod.metadata.deletionTimestamp is not None
    if not spec.nodeName or ended:
        return None
    ports = [port for container in spec.containers or () for port in container.ports or () if port.name == AGENT_PORT]
    port = ports[0].containerPort if ports and 0 < ports[0].containerPort < 65_536 else 0
    host, problem = status.podIP or "", ""
    if host and not _is_pod_address(host, loopback=loopback):
        host, problem = "", f"found pod IP {host[:_MAX_ADDRESS]!a}, expected an address of the cluster's network"
    return Place(pod.metadata.namespace or "", pod.metadata.name or "", spec.nodeName, host, port, problem)


def _is_pod_address(host: str, *, loopback: bool) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return loopback
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


def waiting_pod(pod: Pod, known: Known) -> Waiting | None:
    """A pod that waits for a node; None if it requests none of our resources."""
    requests = requests_of(pod, known)
    if not requests or pod.metadata.deletionTimestamp is not None:
        return None
    conditions = (pod.status.conditions if pod.status else None) or ()
    scheduled = next((each for each in conditions if each.type == "PodScheduled"), None)
    return Waiting(
        namespace=pod.metadata.namespace or "",
        name=pod.metadata.name or "",
        since=_seconds(pod.metadata.creationTimestamp),
        requests=requests,
        message=(scheduled.message or "")[:2048] if scheduled and scheduled.status != "True" else "",
        gates=_limited_gates((pod.spec.schedulingGates if pod.spec else None) or ()),
    )


def _limited_gates(gates: Sequence[Gate]) -> tuple[str, ...]:
    """The names of gates. A pod can have as many as fit into its object, and all viewers load those of all pods."""
    names = tuple(gate.name for gate in gates[:_MAX_GATES])
    return (*names, f"{len(gates) - _MAX_GATES} more") if len(gates) > _MAX_GATES else names


def requests_of(pod: Pod, known: Known) -> dict[str, int]:
    """The requests that the scheduler counts: init containers run before the others, sidecars beside later ones."""
    spec = pod.spec or PodSpec()
    totals: defaultdict[str, int] = defaultdict(int)
    greatest: defaultdict[str, int] = defaultdict(int)
    for container in spec.initContainers or ():
        for resource, count in _requested(container, known):
            if container.restartPolicy == "Always":
                totals[resource] += count
            greatest[resource] = max(
                greatest[resource], totals[resource] + (0 if container.restartPolicy == "Always" else count)
            )
    for container in spec.containers or ():
        for resource, count in _requested(container, known):
            totals[resource] += count
    return {
        resource: max(totals[resource], greatest[resource])
        for resource in sorted(totals.keys() | greatest.keys())
        if max(totals[resource], greatest[resource])
    }


def holders_of(pod: Pod, known: Known) -> Iterator[Holder]:
    """The containers of an assigned pod that hold what they request, as long as it has not ended."""
    spec, status = pod.spec or PodSpec(), pod.status or PodStatus()
    if not spec.nodeName or status.phase in ("Succeeded", "Failed"):
        return
    sidecars = [each for each in spec.initContainers or () if each.restartPolicy == "Always"]
    for container in (*sidecars, *(spec.containers or ())):
        for resource, count in _requested(container, known):
            yield Holder(
                pod.metadata.namespace or "",
                pod.metadata.name or "",
                container.name,
                resource,
                count,
                _seconds(status.startTime),
            )


def quotas_of(quota: ResourceQuota, known: Known) -> Iterator[Quota]:
    """The limits of a ResourceQuota for our resources."""
    status = quota.status or QuotaStatus()
    used = status.used or {}
    for name, hard in (status.hard or {}).items():
        resource = name.removeprefix("requests.")
        if resource != name and known(resource):
            yield Quota(
                quota.metadata.namespace or "",
                quota.metadata.name or "",
                resource,
                _count(hard),
                _count(used.get(name, 0)),
            )


def _requested(container: Container, known: Known) -> Iterator[tuple[str, int]]:
    """Requests and limits of extended resources are equal; the API server adds the one that is missing."""
    resources = container.resources or Requirements()
    for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
        if known(name) and (count := _count(quantity)):
            yield name, count


def _count(quantity: Quantity) -> int:
    number = number_of(quantity)
    return max(0, min(_MAX_COUNT, int(number))) if number is not None else 0


def _seconds(text: str | None) -> float:
    """A time of the API in seconds since the epoch; 0 for none."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except (ValueError, OverflowError):
        return 0.0
