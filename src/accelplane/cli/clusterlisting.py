"""Lists the nodes and pods of a cluster once, as a `Cluster`: for commands, which have no agents and no watches."""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, NotFound, StatusError, resource_path
from accelplane.dra.claims import GROUP, served_version
from accelplane.dra.resourceslice import ResourceSlice
from accelplane.fleet import model
from accelplane.fleet.claims import Claims, Classes, DeviceClass, ResourceClaim, read_claims, read_classes
from accelplane.fleet.families import is_known, is_known_driver
from accelplane.fleet.model import Cluster
from accelplane.fleet.objects import Known, ResourceQuota, holders_of, node_facts, quotas_of, waiting_pod
from accelplane.kube.kinds import Node, Pod
from accelplane.report.inventory import Holder

DEADLINE = 15.0

_PAGE = 250

T = TypeVar("T")


class Scope(Struct, frozen=True, kw_only=True):
    """What to list: pods of `namespace`, or of all with an empty one, and resources that begin with `prefixes` too."""

    namespace: str = ""
    prefixes: Sequence[str] = ()
    quotas: bool = False


class Listed(Struct, frozen=True):
    """The listed objects. `problems` are those of failed lists, `node_names` the nodes with and without resources.

    Without `all_pods` or `all_claims`, nodes have only the holders of the namespace; without `all_nodes` only pods and
    claims name nodes.
    """

    cluster: Cluster
    all_pods: bool = True
    all_nodes: bool = True
    all_claims: bool = True
    problems: Sequence[str] = ()
    node_names: frozenset[str] = frozenset()


class _Lists:
    """The lists of one server. `failed` has the paths of those that failed, by problem."""

    def __init__(self, api: ApiServer, deadline: float) -> None:
        self.api = api
        self.deadline = deadline
        self.failed: dict[str, list[str]] = {}

    async def items(self, path: str, kind: type[T], *, optional: bool = False) -> list[T] | None:
        """The objects, None if they cannot be listed. An `optional` list is not a problem without the right."""
        items: list[T] = []
        try:
            await self.api.list(
                path, lambda raws: items.extend(_decoded(raws, kind)), page=_PAGE, deadline=self.deadline
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.failed.setdefault(f"found an object of another type: {error}", []).append(path)
            return None
        except ApiError as error:
            if not (optional and isinstance(error, StatusError) and error.code == 403):
                self._fail(path, error)
            return None
        return items

    async def claims(self, namespace: str, known: Known) -> tuple[Claims, Classes]:
        """What there is for claims; of claims those of the namespace, if others cannot be listed."""
        try:
            version = await served_version(self.api, deadline=self.deadline)
        except NotFound:
            return read_claims((), (), known), Classes(known)
        except ApiError as error:
            self._fail(f"/apis/{GROUP}", error)
            return read_claims((), None, known), Classes(known)
        slices = await self.items(resource_path(GROUP, version, "resourceslices"), ResourceSlice)
        classes = await self.items(resource_path(GROUP, version, "deviceclasses"), DeviceClass, optional=True)
        claims = await self.items(resource_path(GROUP, version, "resourceclaims"), ResourceClaim)
        own = None
        if claims is None and namespace:
            own = await self.items(resource_path(GROUP, version, "resourceclaims", namespace=namespace), ResourceClaim)
        return read_claims(slices or (), claims, known, own or ()), read_classes(classes or (), known)

    def _fail(self, path: str, error: ApiError) -> None:
        self.failed.setdefault(str(error).removeprefix(f"GET {path}: "), []).append(path)


async def list_cluster(api: ApiServer, scope: Scope, *, deadline: float = DEADLINE) -> Listed:
    """The cluster now. A list that fails is missing, and named in `problems`."""
    lists = _Lists(api, deadline)
    nodes = await lists.items(resource_path("", "v1", "nodes"), Node)
    pods = await lists.items(resource_path("", "v1", "pods"), Pod)
    all_pods = pods is not None
    if pods is None and scope.namespace:
        pods = await lists.items(resource_path("", "v1", "pods", namespace=scope.namespace), Pod)
    quotas: list[ResourceQuota] | None = None
    if scope.quotas:
        quotas = await lists.items(
            resource_path("", "v1", "resourcequotas", namespace=scope.namespace), ResourceQuota, optional=True
        )
    claims, classes = await lists.claims(scope.namespace, partial(is_known_driver, prefixes=scope.prefixes))
    now = time.time()
    problems = [f"cannot list {', '.join(paths)}: {problem}" for problem, paths in lists.failed.items()]
    known = partial(is_known, prefixes=scope.prefixes)
    found = _nodes(nodes or (), pods or (), claims, known, all_pods=all_pods)
    present = {resource.name for node in found.values() for resource in node.resources}
    by_key = {claim.key: claim for claim in claims.claims}

    def requested(pod: Pod) -> Mapping[str, int]:
        namespace = pod.metadata.namespace or ""
        return classes.requests(pod, known, present.__contains__, lambda name: by_key.get((namespace, name)))

    cluster = Cluster(
        generation=1,
        time=now,
        started=now,
        nodes=found,
        waiting=tuple(item for pod in pods or () if (item := waiting_pod(pod, known, requested)) is not None),
        quotas=tuple(quota for each in quotas or () for quota in quotas_of(each, known)),
        problem="; ".join(problems),
    )
    names = frozenset(node.metadata.name or "" for node in nodes or ())
    return Listed(cluster, all_pods, nodes is not None, claims.complete, problems, names)


def _decoded(raws: Iterable[msgspec.Raw], kind: type[T]) -> Iterable[T]:
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(raw) for raw in raws]


def _nodes(
    nodes: Iterable[Node], pods: Iterable[Pod], claims: Claims, known: Known, *, all_pods: bool
) -> dict[str, model.Node]:
    """The nodes that have resources, and, where nodes cannot be listed, those of pods that hold some."""
    held: dict[str, list[Holder]] = {}
    for pod in pods:
        # Requests that the scheduler has turned into a claim have the devices of that claim.
        if pod.status.extendedResourceClaimStatus is None:
            for holder in holders_of(pod, known):
                held.setdefault(pod.spec.nodeName, []).append(holder)
    for each in claims.holders():
        held.setdefault(each.node, []).append(each.holder)
    drivers = claims.resources()
    found: dict[str, model.Node] = {}
    for each in nodes:
        name = each.metadata.name or ""
        facts = node_facts(each, known)
        holders, resources = tuple(held.pop(name, ())), (*facts.resources, *drivers.get(name, ()))
        if resources or holders:
            found[name] = model.Node(
                name, facts.labels, facts.ready, facts.cordoned, facts.taints, resources=resources,
                holders=holders, holders_known=all_pods,
            )  # fmt: skip
    return found | {name: model.Node(name=name, holders=tuple(holders)) for name, holders in held.items()}
