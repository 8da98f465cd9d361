"""Client of the kubelet's pod-resources API, version v1: the devices that containers hold, and those of their claims.

The kubelet returns a container's devices in several entries per resource (per device or per NUMA node, depending on its
version), and a device with two NUMA nodes twice. Here each container and resource is one value with each ID once. The
API serves 100 requests per second for all clients on the node.
"""

import asyncio
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


class DeviceHolder(Struct, frozen=True):
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

    devices: tuple[DeviceHolder, ...]
    claims: tuple[ClaimHolder, ...]


class PodResources:
    """The API at a socket, for one request at a time. The connection stays open for `keep` seconds after a response.

    The requests raise `PodResourcesError`. After an error or a cancellation the connection is closed. The owner of an
    instance with `keep` calls `close` at its end.
    """

    def __init__(self, socket: str, *, keep: float = 0.0) -> None:
        self._socket = socket
        self._keep = keep
        self._channel: rpc.Channel | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def list_holders(self) -> NodeHolders:
        """The containers of this node with devices of device plugins and of claims."""
        response = await self._ask("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
        devices = [
            DeviceHolder(
                pod.namespace, pod.name, container.name, resource, ids, _numa_nodes(container.devices, resource)
            )
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

    async def holder_counts(self, resources: Collection[str]) -> Mapping[tuple[str, str], int]:
        """The number of containers with devices of the resources, for each pod by name."""
        response = await self._ask("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
        return {
            (pod.namespace, pod.name): sum(
                any(entry.resource_name in resources and entry.device_ids for entry in container.devices)
                for container in pod.containers
            )
            for pod in response.pod_resources
        }

    async def allocatable(self) -> Mapping[str, tuple[str, ...]]:
        """The healthy device IDs of each resource, including those in use."""
        response = await self._ask(
            "GetAllocatableResources", pb.AllocatableResourcesRequest(), pb.AllocatableResourcesResponse
        )
        return _sum_ids(response.devices)

    async def close(self) -> None:
        """Closes the connection. A request in progress raises `PodResourcesError`."""
        if self._timer is not None:
            self._timer.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            async with channel:
                pass

    async def _ask(self, method: str, request: Message, response_type: type[rpc.Response]) -> rpc.Response:
        was_open = self._channel is not None
        try:
            try:
                return await self._call(method, request, response_type)
            except rpc.RpcError as error:
                # The kubelet may have ended the connection since the last response.
                if not was_open or error.code != "UNAVAILABLE":
                    raise
            return await self._call(method, request, response_type)
        except (rpc.RpcError, sockets.SocketPathError) as error:
            raise PodResourcesError(f"{self._socket}: {method} failed: {error}") from error

    async def _call(self, method: str, request: Message, response_type: type[rpc.Response]) -> rpc.Response:
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is None:
            self._channel = rpc.Channel(sockets.checked_path(self._socket), max_message=_MAX_MESSAGE)
        try:
            response = await self._channel.call(_SERVICE + method, request, response_type, deadline=_DEADLINE)
        except BaseException:
            await self.close()
            raise
        if self._keep:
            self._timer = asyncio.get_running_loop().call_later(self._keep, self._close_unused)
        else:
            await self.close()
        return response

    def _close_unused(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


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
