"""`accelplane inspect --cluster` and `top --cluster`: the devices of a cluster as the API server knows them.

The numbers are those of the Node status and of the requests of pods, and for claims (DRA) those of ResourceSlices and
ResourceClaims, with the credentials of the caller's kubeconfig.
"""

import asyncio
import os
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from accelplane.apiserver import ApiError, ApiServer, ClientConfig, load_config
from accelplane.apiserver.kubeconfig import read_kubeconfig
from accelplane.cli.clusterlisting import DEADLINE, Listed, Scope, list_cluster
from accelplane.cli.refresh import show
from accelplane.cli.tables import (
    UNKNOWN,
    Column,
    Document,
    Format,
    Row,
    Table,
    UsageError,
    print_problems,
    sort_tables,
    time_text,
)
from accelplane.fleet.arithmetic import allocation, shortages, without_enclave
from accelplane.fleet.families import is_driver
from accelplane.fleet.model import Node, Waiting

_DURATION = re.compile(r"([0-9]{1,6})(ms|s|m|h)?", re.ASCII)
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NODES = (
    Column("NODE"), Column("RESOURCE"), Column("CAPACITY"), Column("ALLOCATABLE"), Column("ALLOCATED"), Column("FREE"),
    Column("UNHEALTHY"), Column("STATE"), Column("HOLDERS", wide=True),
)  # fmt: skip
_NAMESPACES = (
    Column("NAMESPACE"), Column("RESOURCE"), Column("PODS"), Column("ALLOCATED"), Column("NODES", wide=True),
)  # fmt: skip
_ENCLAVES = (Column("NAMESPACE"), Column("POD WITHOUT ENCLAVE"), Column("NODE"), Column("WHY"))
_NO_ENCLAVE = "requests sgx.intel.com/epc and has no enclave: the SGX webhook did not change it; create it again"
_WAITING = (
    Column("NAMESPACE"), Column("POD"), Column("RESOURCE"), Column("REQUESTED"), Column("FREE"),
    Column("MOST ON ONE NODE"), Column("UNHEALTHY"), Column("CORDONED"), Column("NOT READY"), Column("QUOTA LEFT"),
    Column("WAITING SINCE"), Column("REASON"),
)  # fmt: skip


class Request(Struct, frozen=True, kw_only=True):
    """The flags. `namespace` is that of the kubeconfig's context if it is empty."""

    kubeconfig: str = ""
    context: str = ""
    timeout: float = DEADLINE
    namespace: str = ""
    all_namespaces: bool = False
    node: str = ""
    resource: str = ""
    waiting: bool = False


class NodeItem(Struct, frozen=True):
    """A resource of a node, or a driver of claims. `allocated` and `free` are None if not all holders are known."""

    node: str
    resource: str
    capacity: int
    allocatable: int
    allocated: int | None
    free: int | None
    unhealthy: int
    ready: bool
    cordoned: bool
    holders: Sequence[str]


class NamespaceItem(Struct, frozen=True):
    """The IDs of a resource that the pods of a namespace hold."""

    namespace: str
    resource: str
    pods: int
    allocated: int
    nodes: Sequence[str]


class EnclaveItem(Struct, frozen=True):
    """A pod that requests EPC memory and has no enclave device."""

    namespace: str
    pod: str
    node: str
    reason: str


class WaitingItem(Struct, frozen=True):
    """A resource that a waiting pod requests. Unknown numbers are None, and `quota_left` without a quota."""

    namespace: str
    pod: str
    resource: str
    requested: int
    free: int | None
    most_free_on_one_node: int | None
    most_free_node: str | None
    unhealthy: int | None
    cordoned: int | None
    not_ready: int | None
    quota_left: int | None
    since: str | None
    message: str
    scheduling_gates: Sequence[str]


Item = NodeItem | NamespaceItem | EnclaveItem | WaitingItem


def run(request: Request, form: Format, *, interval: float, once: bool, program: str) -> int:
    """Prints the cluster. Returns the exit code, 1 if something could not be read.

    `program` begins the lines on standard error. Raises `UsageError` and `OutputError`.
    """
    if request.waiting and request.node:
        raise UsageError("--node: expected it without --waiting: a waiting pod has no node")
    if request.namespace and request.all_namespaces:
        raise UsageError("-n and -A: found both, expected one of them")
    if request.namespace and not _NAMESPACE.fullmatch(request.namespace):
        raise UsageError(f"-n: found {request.namespace[:80]!a}, expected the name of a namespace")
    sort_tables(_tables(request, "", (), (), ()), form.sort_by)
    try:
        config = config_of(request)
        problems = asyncio.run(_show(config, request, form, interval=interval, once=once, program=program))
    except (ApiError, ValueError) as error:
        problems = [str(error)]
    return print_problems(program, problems)


def timeout_of(text: str) -> float:
    """The seconds of kubectl's `--request-timeout`: `30`, `30s`, `1m`; `0` is the default. Raises `UsageError`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--request-timeout: found {text[:40]!a}, expected a number of seconds or a time like 30s or 1m"
        )
    return int(found[1]) * _UNITS[found[2] or "s"] or DEADLINE


def config_of(request: Request) -> ClientConfig:
    """The server and the credentials. Raises `NoCredentials`."""
    if not request.context:
        return load_config(request.kubeconfig)
    named = request.kubeconfig or os.environ.get("KUBECONFIG", "") or os.path.expanduser("~/.kube/config")
    # The flag names one file, the variable may name several.
    files = [request.kubeconfig] if request.kubeconfig else [each for each in named.split(":") if each]
    return read_kubeconfig(*files, context=request.context)


async def _show(
    config: ClientConfig, request: Request, form: Format, *, interval: float, once: bool, program: str
) -> Sequence[str]:
    """Shows the cluster until the end. Returns the last read errors."""
    api = ApiServer(config, idle_timeout=interval + DEADLINE)
    namespace = "" if request.all_namespaces else request.namespace or config.namespace
    scope = Scope(namespace=namespace, prefixes=[request.resource] if request.resource else [], quotas=request.waiting)

    async def read() -> tuple[Document[Item], Sequence[str]]:
        listed = await list_cluster(api, scope, deadline=request.timeout)
        if request.node and listed.all_nodes and request.node not in listed.node_names:
            listed = replace(listed, problems=[*listed.problems, f"--node: found no node {request.node[:253]!a}"])
        return document(listed, request, namespace), listed.problems

    try:
        api.check()
        return await show(read, form, interval, once=once, program=program)
    finally:
        api.close()


def document(listed: Listed, request: Request, namespace: str) -> Document[Item]:
    """The tables of a list: nodes and namespaces, or waiting pods. `namespace` is empty for all."""
    prefix = request.resource
    nodes = [node for node in listed.cluster.nodes.values() if request.node in ("", node.name)]
    waiting = [item for item in waiting_items(listed) if namespace in ("", item.namespace)]
    tables = _tables(
        request,
        namespace,
        [item for item in node_items(nodes, listed) if item.resource.startswith(prefix)],
        [
            item
            for item in namespace_items(nodes)
            if namespace in ("", item.namespace) and item.resource.startswith(prefix)
        ],
        [item for item in waiting if item.resource.startswith(prefix)],
    )
    if not request.waiting:
        tables = [*tables, Table("podsWithoutEnclave", _ENCLAVES, [*_enclave_rows(nodes, namespace)])]
    if listed.problems:  # then an empty table does not mean that there is nothing
        tables = [replace(table, empty="") for table in tables]
    facts = {"source": "api-server", "problems": list(listed.problems)}
    return Document(tables, facts, "ClusterDeviceList")


def node_items(nodes: Sequence[Node], listed: Listed) -> Iterator[NodeItem]:
    """The resources of nodes, by node and resource."""
    for node in sorted(nodes, key=lambda node: node.name):
        for resource in node.resources:
            numbers = allocation(node, resource)
            counted = listed.all_claims if is_driver(resource.name) else listed.all_pods
            holders = sorted(
                f"{holder.namespace}/{holder.pod}" + (f" ({holder.count})" if holder.count > 1 else "")
                for holder in node.holders
                if holder.resource == resource.name
            )
            yield NodeItem(
                node.name,
                resource.name,
                numbers.ids,
                numbers.healthy,
                numbers.allocated if counted else None,
                numbers.free if counted else None,
                max(0, numbers.ids - numbers.healthy),
                node.ready,
                node.cordoned,
                holders,
            )


def namespace_items(nodes: Sequence[Node]) -> Iterator[NamespaceItem]:
    """The allocations of namespaces, by namespace and resource."""
    found: dict[tuple[str, str], NamespaceItem] = {}
    for node in nodes:
        for holder in node.holders:
            key = holder.namespace, holder.resource
            known = found.get(key, NamespaceItem(*key, 0, 0, ()))
            found[key] = replace(
                known,
                pods=known.pods + 1,
                allocated=known.allocated + holder.count,
                nodes=sorted({*known.nodes, node.name}),
            )
    yield from (found[key] for key in sorted(found))


def waiting_items(listed: Listed) -> Iterator[WaitingItem]:
    """The requests of waiting pods, oldest first, and the free IDs, which are known if all pods are."""
    cluster = listed.cluster
    pods: dict[tuple[str, str], Waiting] = {(pod.namespace, pod.name): pod for pod in cluster.waiting}
    for each in shortages(cluster):
        pod, supply = pods[each.namespace, each.pod], each.supply
        known = listed.all_nodes and (listed.all_claims if is_driver(each.resource) else listed.all_pods)
        yield WaitingItem(
            namespace=each.namespace,
            pod=each.pod,
            resource=each.resource,
            requested=each.requested,
            free=supply.free if known else None,
            most_free_on_one_node=supply.most_free if known else None,
            most_free_node=supply.most_free_node or None if known else None,
            unhealthy=supply.unhealthy if known else None,
            cordoned=supply.cordoned if known else None,
            not_ready=supply.unready if known else None,
            quota_left=each.quota_left,
            since=time_text(pod.since),
            message=pod.message,
            scheduling_gates=pod.gates,
        )


def _tables(
    request: Request,
    namespace: str,
    nodes: Sequence[NodeItem],
    namespaces: Sequence[NamespaceItem],
    waiting: Sequence[WaitingItem],
) -> Sequence[Table[Item]]:
    pod = f"No pod of namespace {namespace}" if namespace else "No pod"
    devices = f"devices of {request.resource}" if request.resource else "devices"
    if request.waiting:
        rows: list[Row[Item]] = [_waiting_row(item) for item in waiting]
        return [Table("waiting", _WAITING, rows, empty=f"{pod} waits for {devices}.")]
    node = f"Node {request.node} has no {devices}." if request.node else f"No node has {devices}."
    place = f" on node {request.node}" if request.node else ""
    return [
        Table("nodes", _NODES, [_node_row(item) for item in nodes], empty=node),
        Table(
            "namespaces",
            _NAMESPACES,
            [_namespace_row(item) for item in namespaces],
            empty=f"{pod} holds {devices}{place}.",
        ),
    ]


def _node_row(item: NodeItem) -> Row[Item]:
    state = "Ready" if item.ready else "NotReady"
    cells = (
        item.node,
        item.resource,
        str(item.capacity),
        str(item.allocatable),
        _number(item.allocated),
        _number(item.free),
        str(item.unhealthy),
        f"{state},Cordoned" if item.cordoned else state,
        ", ".join(item.holders) or UNKNOWN,
    )
    return Row(f"{item.node}/{item.resource}", cells, item)


def _namespace_row(item: NamespaceItem) -> Row[Item]:
    cells = (item.namespace, item.resource, str(item.pods), str(item.allocated), ", ".join(item.nodes))
    return Row(f"{item.namespace}/{item.resource}", cells, item)


def _waiting_row(item: WaitingItem) -> Row[Item]:
    gates = f"scheduling gates: {', '.join(item.scheduling_gates)}" if item.scheduling_gates else ""
    most = _number(item.most_free_on_one_node)
    cells = (
        item.namespace,
        item.pod,
        item.resource,
        str(item.requested),
        _number(item.free),
        f"{most} ({item.most_free_node})" if item.most_free_node else most,
        _number(item.unhealthy),
        _number(item.cordoned),
        _number(item.not_ready),
        _number(item.quota_left),
        item.since or UNKNOWN,
        item.message or gates or UNKNOWN,
    )
    return Row(f"{item.namespace}/{item.pod}", cells, item)


def _enclave_rows(nodes: Sequence[Node], namespace: str) -> Iterator[Row[Item]]:
    for node in nodes:
        for place, pod in without_enclave(node):
            if namespace in ("", place):
                item = EnclaveItem(place, pod, node.name, _NO_ENCLAVE)
                yield Row(f"{place}/{pod}", (place, pod, node.name, _NO_ENCLAVE), item)


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
