"""Client of the kubelet's pod-resources API, version v1: the devices that containers hold, and those of their claims.

The kubelet returns a container's devices in several entries per resource (per device or per NUMA node, depending on its
version), and a device with two NUMA nodes twice. Here each container and resource is one value with each ID once. The
API serves 100 requests per second for all clients on the node.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.message import Message
from msgspec import Struct

from accelplane import rpc
from accelplane.devices import natural
from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.kubelet import sockets

_SERVICE = "/v1.PodResourcesLister/"
_DEADLINE = 5.0
_MAX_MESSAGE = 16 * 1024 * 1024


class PodResourcesError(Exception):
    """The kubelet's pod-resources socket returned no usable response; the text names the socket."""


class Holder(Struct, frozen=True):
    """A container and the devices of one resource that it holds: IDs in natural order, NUMA nodes by ID, if any."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    numa_nodes: Mapping[str, Sequence[int]] = {}


class ClaimHolder(Struct, frozen=True):
    """A container and the CDI devices of one device of a claim (dynamic resource allocation)."""

    namespace: str
    pod: str
    container: str
    driver: str
    pool: str
    device: str
    cdi_names: tuple[str, ...]


class NodeHolders(NamedTuple):
    """What the containers of a node hold: devices of device plugins in the kubelet's order, those of claims by name."""

    devices: tuple[Holder, ...]
    claims: tuple[ClaimHolder, ...]


async def list_holders(socket: str) -> NodeHolders:
    """The containers of this node with devices of device plugins and of claims. Raises `PodResourcesError`."""
    response = await _ask(socket, "List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
    devices = [
        Holder(pod.namespace, pod.name, container.name, resource, ids, _numa_nodes(container.devices, resource))
        for pod in response.pod_resources
        for container in pod.containers
        for resource, ids in _sum_ids(container.devices).items()
    ]
    claims = {
        ClaimHolder(
            *(pod.namespace, pod.name, container.name, each.driver_name, each.pool_name, each.device_name),
            tuple(sorted({device.name for device in each.cdi_devices})),
        )
        for pod in response.pod_resources
        for container in pod.containers
        for claim in container.dynamic_resources
        for each in claim.claim_resources
    }
    return NodeHolders(
        tuple(devices),
        tuple(sorted(claims, key=lambda one: (one.namespace, one.pod, one.container, one.driver, one.device))),
    )


async def holder_counts(socket: str, resources: Collection[str]) -> Mapping[tuple[str, str], int]:
    """The number of containers with devices of the resources, for each pod by name. Raises `PodResourcesError`."""
    response = await _ask(socket, "List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
    return {
        (pod.namespace, pod.name): sum(
            any(entry.resource_name in resources and entry.device_ids for entry in container.devices)
            for container in pod.containers
        )
        for pod in response.pod_resources
    }


async def allocatable(socket: str) -> Mapping[str, tuple[str, ...]]:
    """The healthy device IDs of each resource, including those in use. Raises `PodResourcesError`."""
    response = await _ask(
        socket, "GetAllocatableResources", pb.AllocatableResourcesRequest(), pb.AllocatableResourcesResponse
    )
    return _sum_ids(response.devices)


def _sum_ids(entries: Iterable[pb.ContainerDevices]) -> dict[str, tuple[str, ...]]:
    ids: dict[str, set[str]] = {}
    for entry in entries:
        ids.setdefault(entry.resource_name, set()).update(entry.device_ids)
    return {resource: tuple(sorted(ids[resource], key=natural)) for resource in sorted(ids)}


def _numa_nodes(entries: Iterable[pb.ContainerDevices], resource: str) -> dict[str, tuple[int, ...]]:
    nodes: dict[str, set[int]] = {}
    for entry in entries:
        if entry.resource_name == resource and entry.topology.nodes:
            for id_ in entry.device_ids:
                nodes.setdefault(id_, set()).update(node.ID for node in entry.topology.nodes)
    return {id_: tuple(sorted(numbers)) for id_, numbers in nodes.items()}


async def _ask(socket: str, method: str, request: Message, response_type: type[rpc.Response]) -> rpc.Response:
    try:
        path = sockets.checked_path(socket)
        async with rpc.Channel(path, max_message=_MAX_MESSAGE) as channel:
            return await channel.call(_SERVICE + method, request, response_type, deadline=_DEADLINE)
    except (rpc.RpcError, sockets.SocketPathError) as error:
        raise PodResourcesError(f"{socket}: {method} failed: {error}") from error
