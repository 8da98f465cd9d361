"""Lists the nodes and pods of a cluster once, as a `Cluster`: for commands, which have no agents and no watches.

Facts: Kubernetes documentation of extended resources (requests equal limits), of sidecar containers (how requests of
init containers and containers are combined), and of ResourceQuota (`requests.<extended resource>`).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, StatusError, resource_path
from accelplane.kube.quantities import number_of

from .families import is_known
from .model import Cluster, Holder, Node, Quota, Resource, Waiting

DEADLINE = 15.0

_QUOTA_PREFIX = "requests."
_MAX_MESSAGE = 1024
_PAGE = 250

T = TypeVar("T")


class Scope(Struct, frozen=True, kw_only=True):
    """What to list: pods of `namespace`, or of all with an empty one, and resources that begin with `prefixes` too."""

    namespace: str = ""
    prefixes: Sequence[str] = ()
    quotas: bool = False


class Listed(Struct, frozen=True):
    """The listed objects. `problems` are those of failed lists, `node_names` the nodes with and without resources.

    Without `all_pods`, nodes have only the holders of the namespace; without `all_nodes` only pods name nodes.
    """

    cluster: Cluster
    all_pods: bool = True
    all_nodes: bool = True
    problems: Sequence[str] = ()
    node_names: frozenset[str] = frozenset()


class _Metadata(Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    created: datetime | None = msgspec.field(name="creationTimestamp", default=None)
    deleted: datetime | None = msgspec.field(name="deletionTimestamp", default=None)


class _Condition(Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    message: str | None = None
    last_transition_time: datetime | None = None


Quantities = dict[str, str | int | float] | None


class _NodeSpec(Struct, frozen=True):
    unschedulable: bool | None = None


class _NodeStatus(Struct, frozen=True):
    capacity: Quantities = None
    allocatable: Quantities = None
    conditions: list[_Condition] | None = None


class _Node(Struct, frozen=True):
    metadata: _Metadata
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _Requests(Struct, frozen=True):
    requests: Quantities = None


class _Container(Struct, frozen=True, rename="camel"):
    name: str = ""
    resources: _Requests = _Requests()
    restart_policy: str | None = None


class _Gate(Struct, frozen=True):
    name: str = ""


class _PodSpec(Struct, frozen=True, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None
    scheduling_gates: list[_Gate] | None = None


class _PodStatus(Struct, frozen=True):
    phase: str = ""
    conditions: list[_Condition] | None = None


class Pod(Struct, frozen=True):
    """The part of a pod with its requests, its node, and the reason why it is not scheduled."""

    metadata: _Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _QuotaStatus(Struct, frozen=True):
    hard: Quantities = None
    used: Quantities = None


class _Quota(Struct, frozen=True):
    metadata: _Metadata
    status: _QuotaStatus = _QuotaStatus()


async def list_cluster(api: ApiServer, scope: Scope, *, deadline: float = DEADLINE) -> Listed:
    """The cluster now. A list that fails is missing, and named in `problems`."""
    failed: dict[str, list[str]] = {}  # paths by problem

    async def listed(path: str, kind: type[T], *, optional: bool = False) -> list[T] | None:
        items: list[T] = []
        try:
            await api.list(path, lambda raws: items.extend(_decoded(raws, kind)), page=_PAGE, deadline=deadline)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            failed.setdefault(f"found an object of another type: {error}", []).append(path)
            return None
        except ApiError as error:
            if not (optional and isinstance(error, StatusError) and error.code == 403):
                failed.setdefault(str(error).removeprefix(f"GET {path}: "), []).append(path)
            return None
        return items

    nodes = await listed(resource_path("", "v1", "nodes"), _Node)
    pods = await listed(resource_path("", "v1", "pods"), Pod)
    all_pods = pods is not None
    if pods is None and scope.namespace:
        pods = await listed(resource_path("", "v1", "pods", namespace=scope.namespace), Pod)
    quotas: list[_Quota] | None = None
    if scope.quotas:
        quotas = await listed(
            resource_path("", "v1", "resourcequotas", namespace=scope.namespace), _Quota, optional=True
        )
    now = time.time()
    problems = [f"cannot list {', '.join(paths)}: {problem}" for problem, paths in failed.items()]

    def known(name: str) -> bool:
        return is_known(name, scope.prefixes)

    cluster = Cluster(
        generation=1,
        time=now,
        started=now,
        nodes=_nodes(nodes or (), pods or (), known),
        waiting=tuple(_waiting(pods or (), known)),
        quotas=tuple(_quotas(quotas or (), known)),
        problem="; ".join(problems),
    )
    names = frozenset(node.metadata.name for node in nodes or ())
    return Listed(cluster, all_pods, nodes is not None, problems, names)


def requests(pod: Pod, known: Callable[[str], bool]) -> dict[str, int]:
    """The IDs of each resource that the scheduler counts for a pod."""
    running: dict[str, int] = {}
    highest: dict[str, int] = {}
    for container in pod.spec.init_containers or ():
        amounts = _counts(container.resources.requests, known)
        for resource, count in amounts.items():
            total = running.get(resource, 0) + count
            highest[resource] = max(highest.get(resource, 0), total)
            if container.restart_policy == "Always":  # a sidecar continues to run
                running[resource] = total
    for container in pod.spec.containers:
        for resource, count in _counts(container.resources.requests, known).items():
            running[resource] = running.get(resource, 0) + count
    return {resource: max(running.get(resource, 0), highest.get(resource, 0)) for resource in {**running, **highest}}


def _decoded(raws: Iterable[msgspec.Raw], kind: type[T]) -> Iterable[T]:
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(raw) for raw in raws]


def _nodes(nodes: Iterable[_Node], pods: Iterable[Pod], known: Callable[[str], bool]) -> dict[str, Node]:
    """The nodes that have resources, and, where nodes cannot be listed, those of pods that hold some."""
    held: dict[str, list[Holder]] = {}
    for pod in pods:
        if pod.spec.node_name and pod.status.phase not in ("Succeeded", "Failed"):
            held.setdefault(pod.spec.node_name, []).extend(_holders(pod, known))
    found: dict[str, Node] = {}
    for each in nodes:
        name = each.metadata.name
        resources = _resources(each.status, known)
        if resources or held.get(name):
            conditions = each.status.conditions or ()
            found[name] = Node(
                name=name,
                labels=each.metadata.labels or {},
                ready=any(condition.type == "Ready" and condition.status == "True" for condition in conditions),
                cordoned=bool(each.spec.unschedulable),
                resources=resources,
                holders=tuple(held.get(name, ())),
            )
    for name, holders in held.items():
        if holders and name not in found:
            found[name] = Node(name=name, holders=tuple(holders))
    return found


def _holders(pod: Pod, known: Callable[[str], bool]) -> Iterable[Holder]:
    """The pod as one holder of each resource: the API server does not know which container has which ID."""
    since = _scheduled(pod)
    changed = since.last_transition_time if since else None
    for resource, count in requests(pod, known).items():
        if count:
            name, namespace = pod.metadata.name, pod.metadata.namespace
            yield Holder(namespace, name, "", resource, count, changed.timestamp() if changed else 0.0)


def _resources(status: _NodeStatus, known: Callable[[str], bool]) -> tuple[Resource, ...]:
    capacity, allocatable = _counts(status.capacity, known), _counts(status.allocatable, known)
    return tuple(
        Resource(name, capacity.get(name, 0), allocatable.get(name, 0))
        for name in sorted(capacity.keys() | allocatable.keys())
    )


def _waiting(pods: Iterable[Pod], known: Callable[[str], bool]) -> Iterable[Waiting]:
    for pod in pods:
        # The scheduler ignores pods that are being deleted.
        if pod.spec.node_name or pod.status.phase not in ("", "Pending") or pod.metadata.deleted is not None:
            continue
        requested = {resource: count for resource, count in requests(pod, known).items() if count}
        if requested:
            condition = _scheduled(pod)
            created = pod.metadata.created
            yield Waiting(
                namespace=pod.metadata.namespace,
                name=pod.metadata.name,
                since=created.timestamp() if created else 0.0,
                requests=requested,
                message=((condition.message if condition else None) or "")[:_MAX_MESSAGE],
                gates=tuple(gate.name for gate in pod.spec.scheduling_gates or ()),
            )


def _scheduled(pod: Pod) -> _Condition | None:
    return next((each for each in pod.status.conditions or () if each.type == "PodScheduled"), None)


def _quotas(quotas: Iterable[_Quota], known: Callable[[str], bool]) -> Iterable[Quota]:
    for quota in quotas:
        used = quota.status.used or {}
        for key, hard in (quota.status.hard or {}).items():
            resource = key.removeprefix(_QUOTA_PREFIX)
            if key.startswith(_QUOTA_PREFIX) and known(resource):
                yield Quota(
                    quota.metadata.namespace, quota.metadata.name, resource, _count(hard), _count(used.get(key, 0))
                )


def _counts(quantities: Mapping[str, str | int | float] | None, known: Callable[[str], bool]) -> dict[str, int]:
    return {name: _count(quantity) for name, quantity in (quantities or {}).items() if known(name)}


def _count(quantity: str | float) -> int:
    """The number; 0 for a text that is none, which the API server does not accept."""
    return int(number_of(quantity) or 0)
