"""The kubelet's pod resources API, version v1: the devices of each container.

As in the real kubelet, every device is a separate entry, once for each of its NUMA nodes.
"""

from collections.abc import Callable, Iterable, Mapping

import grpc.aio
from google.protobuf.message import Message

from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.kubelet.checkpoint import NO_NODE, Holding
from accelplane.kubelet.embedded.model import ResourceStatus, RunningPod
from accelplane.kubelet.embedded.service import service

SERVICE = "v1.PodResourcesLister"


def pod_list(
    pods: Iterable[RunningPod],
    holdings: Iterable[Holding],
    claims: Callable[[RunningPod, str], Iterable[pb.DynamicResource]],
) -> pb.ListPodResourcesResponse:
    """All pods with all their containers, also those that hold nothing. `claims` are those of a container."""
    held: dict[tuple[str, str], list[Holding]] = {}
    for holding in holdings:
        held.setdefault((holding.pod_uid, holding.container), []).append(holding)
    return pb.ListPodResourcesResponse(
        pod_resources=[
            pb.PodResources(
                name=pod.name,
                namespace=pod.namespace,
                containers=[
                    pb.ContainerResources(
                        name=container,
                        devices=[
                            _entry(holding.resource, key, node)
                            for holding in held.get((pod.uid, container), ())
                            for node, ids in holding.devices.items()
                            for key in ids
                        ],
                        dynamic_resources=claims(pod, container),
                    )
                    for container in pod.containers
                ],
            )
            for pod in pods
        ]
    )


def allocatable(resources: Mapping[str, ResourceStatus]) -> pb.AllocatableResourcesResponse:
    """The healthy devices, held or not."""
    return pb.AllocatableResourcesResponse(
        devices=[
            _entry(resource, key, node)
            for resource, status in resources.items()
            for key, device in status.devices.items()
            if device.healthy
            for node in device.nodes or (NO_NODE,)
        ]
    )


def handlers(
    list_pods: Callable[[], pb.ListPodResourcesResponse],
    list_allocatable: Callable[[], pb.AllocatableResourcesResponse],
) -> grpc.GenericRpcHandler:
    """The service; the functions return its current answers."""

    async def answer_list(_request: Message, _context: object) -> pb.ListPodResourcesResponse:
        return list_pods()

    async def answer_allocatable(_request: Message, _context: object) -> pb.AllocatableResourcesResponse:
        return list_allocatable()

    async def answer_get(
        request: pb.GetPodResourcesRequest,
        context: grpc.aio.ServicerContext[pb.GetPodResourcesRequest, pb.GetPodResourcesResponse],
    ) -> pb.GetPodResourcesResponse:
        for pod in list_pods().pod_resources:
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return pb.GetPodResourcesResponse(pod_resources=pod)
        return await context.abort(
            grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )

    return service(
        SERVICE,
        {
            "List": (answer_list, pb.ListPodResourcesRequest),
            "GetAllocatableResources": (answer_allocatable, pb.AllocatableResourcesRequest),
            "Get": (answer_get, pb.GetPodResourcesRequest),
        },
    )


def _entry(resource: str, key: str, node: int) -> pb.ContainerDevices:
    entry = pb.ContainerDevices(resource_name=resource, device_ids=[key])
    if node != NO_NODE:
        entry.topology.nodes.add(ID=node)
    return entry
