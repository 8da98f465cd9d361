"""Nodes and pods with the fields that programs read, and what a pod requests.

A complete node is a hundred times as large. A program's cache has a transform that removes what this program does not
read; the constants `NO_SPEC` and `NO_STATUS` stand for what was removed.

Facts: Kubernetes documentation of extended resources (requests equal limits), sidecar containers (how requests of init
containers and containers are combined), pod overhead, and pod-level resources. The last ones cannot name extended
resources: the API server accepts cpu, memory and hugepages only.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct

from .objects import ApiInfo, GlobalResource, Identity, NamespacedResource, api
from .quantities import Quantity, number_of

_MAX_COUNT = 2**53


class NarrowMetadata(Identity, kw_only=True, gc=False):
    """The metadata of nodes and pods that programs read."""

    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None


class Condition(Struct, gc=False):
    """A condition of an object."""

    type: str = ""
    status: str = ""
    message: str | None = None


class Taint(Struct, frozen=True, gc=False):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Struct, frozen=True):
    unschedulable: bool = False
    taints: Sequence[Taint] | None = None


class NodeInfo(Struct, frozen=True):
    kernelVersion: str = ""


class NodeStatus(Struct, frozen=True):
    capacity: dict[str, Quantity] | None = None
    allocatable: dict[str, Quantity] | None = None
    conditions: Sequence[Condition] | None = None
    nodeInfo: NodeInfo = NodeInfo()


class Node(GlobalResource, Struct, kw_only=True):
    """A node."""

    metadata: NarrowMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}

    @property
    def is_ready(self) -> bool:
        return is_true("Ready", self.status.conditions)


class NodeLabels(GlobalResource, Struct, kw_only=True):
    """The metadata of a node: the API server sends nothing else."""

    metadata: NarrowMetadata
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Node", "nodes")


class Port(Struct, frozen=True, gc=False):
    name: str = ""
    containerPort: int = 0


class Requirements(Struct, frozen=True):
    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None


class Container(Struct, frozen=True):
    """A container. An init container with `restartPolicy` Always is a sidecar, which continues to run."""

    name: str = ""
    image: str = ""
    ports: Sequence[Port] | None = None
    resources: Requirements = Requirements()
    restartPolicy: str | None = None


class SchedulingGate(Struct, frozen=True, gc=False):
    name: str = ""


class Toleration(Struct, frozen=True, gc=False):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class SelectorRequirement(Struct, frozen=True):
    key: str = ""
    operator: str = ""
    values: Sequence[str] | None = None


class NodeSelectorTerm(Struct, frozen=True):
    matchExpressions: Sequence[SelectorRequirement] | None = None
    matchFields: Sequence[SelectorRequirement] | None = None


class NodeSelector(Struct, frozen=True):
    nodeSelectorTerms: Sequence[NodeSelectorTerm] | None = None


class NodeAffinity(Struct, frozen=True):
    requiredDuringSchedulingIgnoredDuringExecution: NodeSelector | None = None


class Affinity(Struct, frozen=True):
    nodeAffinity: NodeAffinity | None = None


class PodClaim(Struct, frozen=True):
    """A claim of a pod. `resourceClaimName` is empty if the claim is made from a template."""

    name: str = ""
    resourceClaimName: str | None = None


class PodExtendedClaim(Struct, frozen=True):
    """The claim that the scheduler made for requests of extended resources."""

    resourceClaimName: str = ""


class PodSpec(Struct, frozen=True):
    nodeName: str = ""
    serviceAccountName: str = ""
    containers: Sequence[Container] | None = None
    initContainers: Sequence[Container] | None = None
    overhead: dict[str, Quantity] | None = None
    schedulingGates: Sequence[SchedulingGate] | None = None
    nodeSelector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: Sequence[Toleration] | None = None
    resourceClaims: Sequence[PodClaim] | None = None


class PodStatus(Struct, frozen=True):
    phase: str = ""
    podIP: str = ""
    startTime: str | None = None
    conditions: Sequence[Condition] | None = None
    resourceClaimStatuses: Sequence[PodClaim] | None = None
    extendedResourceClaimStatus: PodExtendedClaim | None = None


NO_SPEC, NO_STATUS = PodSpec(), PodStatus()


class Pod(NamespacedResource, Struct, kw_only=True):
    """A pod."""

    metadata: NarrowMetadata
    spec: PodSpec = NO_SPEC
    status: PodStatus = NO_STATUS
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def is_finished(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")


@functools.lru_cache(maxsize=8192)
def placement(node: str) -> PodSpec:
    """A spec with the node only. Pods of a node share it."""
    return PodSpec(nodeName=node)


def is_true(condition_type: str, conditions: Iterable[Condition] | None) -> bool:
    """Whether there is a condition of this type with the status True."""
    return any(each.type == condition_type and each.status == "True" for each in conditions or ())


def pod_requests(spec: PodSpec, wanted: Callable[[str], bool]) -> dict[str, int]:
    """The counts of extended resources that the scheduler reserves for a pod until it has finished, without zeros.

    Init containers run before the others and beside earlier sidecars. The kubelet gives their devices to the containers
    that follow, but not to other pods.
    """
    running: dict[str, int] = {}
    highest: dict[str, int] = {}
    for container in spec.initContainers or ():
        for resource, count in _requested(container, wanted):
            total = running.get(resource, 0) + count
            highest[resource] = max(highest.get(resource, 0), total)
            if container.restartPolicy == "Always":
                running[resource] = total
    for container in spec.containers or ():
        for resource, count in _requested(container, wanted):
            running[resource] = running.get(resource, 0) + count
    counts = {name: max(running.get(name, 0), highest.get(name, 0)) for name in sorted(running | highest)}
    for resource, count in _counts(spec.overhead or {}, wanted):
        counts[resource] = counts.get(resource, 0) + count
    return counts


def count_of(quantity: Quantity) -> int:
    """A number of devices; 0 for a text that is no quantity, which the API server does not accept."""
    number = number_of(quantity)
    return max(0, min(_MAX_COUNT, int(number))) if number is not None else 0


def _requested(container: Container, wanted: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Requests and limits of extended resources are equal; the API server adds the one that is missing."""
    resources = container.resources
    return _counts({**(resources.limits or {}), **(resources.requests or {})}, wanted)


def _counts(quantities: Mapping[str, Quantity], wanted: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    for name, quantity in quantities.items():
        if wanted(name) and (count := count_of(quantity)):
            yield name, count
