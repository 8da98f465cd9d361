"""Lists the nodes and pods of a cluster once, as a `Cluster`: for commands, which have no agents and no watches."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, StatusError, resource_path
from accelplane.fleet import model
from accelplane.fleet.families import is_known
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

    Without `all_pods`, nodes have only the holders of the namespace; without `all_nodes` only pods name nodes.
    """

    cluster: Cluster
    all_pods: bool = True
    all_nodes: bool = True
    problems: Sequence[str] = ()
    node_names: frozenset[str] = frozenset()


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

    nodes = await listed(resource_path("", "v1", "nodes"), Node)
    pods = await listed(resource_path("", "v1", "pods"), Pod)
    all_pods = pods is not None
    if pods is None and scope.namespace:
        pods = await listed(resource_path("", "v1", "pods", namespace=scope.namespace), Pod)
    quotas: list[ResourceQuota] | None = None
    if scope.quotas:
        quotas = await listed(
            resource_path("", "v1", "resourcequotas", namespace=scope.namespace), ResourceQuota, optional=True
        )
    now = time.time()
    problems = [f"cannot list {', '.join(paths)}: {problem}" for problem, paths in failed.items()]
    known = partial(is_known, prefixes=scope.prefixes)
    cluster = Cluster(
        generation=1,
        time=now,
        started=now,
        nodes=_nodes(nodes or (), pods or (), known, all_pods=all_pods),
        waiting=tuple(found for pod in pods or () if (found := waiting_pod(pod, known)) is not None),
        quotas=tuple(quota for each in quotas or () for quota in quotas_of(each, known)),
        problem="; ".join(problems),
    )
    names = frozenset(node.metadata.name or "" for node in nodes or ())
    return Listed(cluster, all_pods, nodes is not None, problems, names)


def _decoded(raws: Iterable[msgspec.Raw], kind: type[T]) -> Iterable[T]:
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(raw) for raw in raws]


def _nodes(nodes: Iterable[Node], pods: Iterable[Pod], known: Known, *, all_pods: bool) -> dict[str, model.Node]:
    """The nodes that have resources, and, where nodes cannot be listed, those of pods that hold some."""
    held: dict[str, list[Holder]] = {}
    for pod in pods:
        for holder in holders_of(pod, known):
            held.setdefault(pod.spec.nodeName, []).append(holder)
    found: dict[str, model.Node] = {}
    for each in nodes:
        name = each.metadata.name or ""
        facts = node_facts(each, known)
        holders = tuple(held.pop(name, ()))
        if facts.resources or holders:
            found[name] = model.Node(
                name, facts.labels, facts.ready, facts.cordoned, facts.taints, resources=facts.resources,
                holders=holders, holders_known=all_pods,
            )  # fmt: skip
    return found | {name: model.Node(name=name, holders=tuple(holders)) for name, holders in held.items()}
