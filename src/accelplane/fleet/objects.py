"""The facts in nodes, pods and quotas: for the caches of the fleet's server, and for commands that list them once."""

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from accelplane.kube.interning import StringPool
from accelplane.kube.kinds import (
    NO_SPEC,
    NO_STATUS,
    Node,
    NodeStatus,
    Pod,
    PodSpec,
    SchedulingGate,
    Taint,
    count_of,
    pod_requests,
)
from accelplane.kube.objects import ApiInfo, Identity, NamespacedResource, api
from accelplane.kube.quantities import Quantity
from accelplane.report.inventory import Holder

from .agents import Place
from .model import NodeResource, Quota, Waiting

AGENT_LABELS: Mapping[str, str] = {
    "app.kubernetes.io/part-of": "accelplane",
    "app.kubernetes.io/component": "agent",
}
AGENT_PORT = "pages"

_MAX_GATES = 16
_MAX_TAINTS = 32
_MAX_MESSAGE = 2048
_MAX_ADDRESS = 64

Known = Callable[[str], bool]


class QuotaStatus(Struct):
    hard: dict[str, Quantity] | None = None
    used: dict[str, Quantity] | None = None


class ResourceQuota(NamespacedResource, Struct, kw_only=True):
    """A quota."""

    _api_info: ClassVar[ApiInfo] = api("", "v1", "ResourceQuota", "resourcequotas")
    metadata: Identity
    status: QuotaStatus | None = None


class NodeFacts(Struct, frozen=True):
    """The properties of a node from its object."""

    labels: Mapping[str, str]
    ready: bool
    cordoned: bool
    resources: tuple[NodeResource, ...]
    taints: tuple[Taint, ...] = ()


# Transforms of caches


def relevant_node(known: Known) -> Callable[[Node], None]:
    """A transform that removes from a node what `node_facts` does not read."""
    shared = StringPool(50_000)

    def transform(node: Node) -> None:
        node.metadata.annotations = None
        node.metadata.labels = {shared(name): shared(value) for name, value in node.labels.items()} or None
        status = node.status
        capacity, allocatable = (
            {name: amount for name, amount in (amounts or {}).items() if known(name)} or None
            for amounts in (status.capacity, status.allocatable)
        )
        conditions = [each for each in status.conditions or () if each.type == "Ready"]
        node.status = NodeStatus(capacity, allocatable, conditions)

    return transform


def relevant_pod(known: Known) -> Callable[[Pod], None]:
    """A transform that removes what neither `waiting_pod` nor `holders_of` reads; everything if the pod requests none.

    Its metadata stay: without them the cache would not know the version. A pod that is not assigned may request devices
    by claims.
    """

    def transform(pod: Pod) -> None:
        pod.metadata.labels = pod.metadata.annotations = pod.metadata.ownerReferences = None
        waits_for_claims = pod.spec.resourceClaims and not pod.spec.nodeName
        if not waits_for_claims and not pod_requests(pod.spec, known):
            pod.spec, pod.status = NO_SPEC, NO_STATUS
        elif pod.spec.nodeName:
            agent_pod(pod)

    return transform


def agent_pod(pod: Pod) -> None:
    """A transform that removes rules for nodes, which an assigned pod does not need."""
    pod.spec = replace(pod.spec, nodeSelector=None, affinity=None, tolerations=None, resourceClaims=None)


# Facts


def node_facts(node: Node, known: Known) -> NodeFacts:
    """The facts of a node."""
    capacity, allocatable = node.status.capacity or {}, node.status.allocatable or {}
    return NodeFacts(
        labels=node.labels,
        ready=node.is_ready,
        cordoned=node.spec.unschedulable,
        taints=tuple((node.spec.taints or ())[:_MAX_TAINTS]),
        resources=tuple(
            NodeResource(name, capacity=count_of(capacity.get(name, 0)), allocatable=count_of(allocatable.get(name, 0)))
            for name in sorted(capacity.keys() | allocatable.keys())
            if known(name)
        ),
    )


def agent_identity(pod: Pod) -> tuple[str, str]:
    """The namespace and the service account of an agent's pod. Labels can be set by everyone who creates pods."""
    return pod.metadata.namespace or "", pod.spec.serviceAccountName


def agent_place(pod: Pod, *, loopback: bool = False) -> Place | None:
    """Where an agent's pod serves; None if it is not on a node, has ended or ends.

    The kubelet writes the address: that of an attacked node could direct requests to programs in the pod of the fleet,
    or to services of its node. `loopback` permits loopback addresses.
    """
    spec = pod.spec
    if not spec.nodeName or pod.is_finished or pod.metadata.deletionTimestamp is not None:
        return None
    ports = [port for container in spec.containers or () for port in container.ports or () if port.name == AGENT_PORT]
    port = ports[0].containerPort if ports and 0 < ports[0].containerPort < 65_536 else 0
    host, problem = pod.status.podIP, ""
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


def waiting_pod(pod: Pod, known: Known, requested: Callable[[Pod], Mapping[str, int]] | None = None) -> Waiting | None:
    """A pod that waits for a node; None if it requests none of our resources. The scheduler ignores pods that end.

    `requested` returns what a pod requests, by default the `known` resources of its containers.
    """
    if pod.spec.nodeName or pod.status.phase not in ("", "Pending") or pod.metadata.deletionTimestamp is not None:
        return None
    requests = pod_requests(pod.spec, known) if requested is None else requested(pod)
    if not requests:
        return None
    scheduled = next((each for each in pod.status.conditions or () if each.type == "PodScheduled"), None)
    return Waiting(
        namespace=pod.metadata.namespace or "",
        name=pod.metadata.name or "",
        since=_seconds(pod.metadata.creationTimestamp),
        requests=requests,
        message=(scheduled.message or "")[:_MAX_MESSAGE] if scheduled and scheduled.status != "True" else "",
        gates=_limited_gates(pod.spec.schedulingGates or ()),
        spec=PodSpec(nodeSelector=pod.spec.nodeSelector, affinity=pod.spec.affinity, tolerations=pod.spec.tolerations),
    )


def _limited_gates(gates: Sequence[SchedulingGate]) -> tuple[str, ...]:
    """The names of gates. A pod can have as many as fit into its object, and all viewers load those of all pods."""
    names = tuple(gate.name for gate in gates[:_MAX_GATES])
    return (*names, f"{len(gates) - _MAX_GATES} more") if len(gates) > _MAX_GATES else names


def holders_of(pod: Pod, known: Known) -> Iterator[Holder]:
    """An assigned pod as a holder of each resource: the API server does not know which container has which ID."""
    if pod.spec.nodeName and not pod.is_finished:
        name, namespace, since = pod.metadata.name or "", pod.metadata.namespace or "", _seconds(pod.status.startTime)
        for resource, count in pod_requests(pod.spec, known).items():
            yield Holder(namespace, name, "", resource, count, since)


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
                count_of(hard),
                count_of(used.get(name, 0)),
            )


def _seconds(text: str | None) -> float:
    """A time of the API in seconds since the epoch; 0 for none."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except (ValueError, OverflowError):
        return 0.0
