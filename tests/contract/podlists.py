"""A kubelet's pod-resources API with given answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from accelplane.kubelet import podresources_v1_pb2 as pb


@asynccontextmanager
async def answering(socket: str, **answers: bytes | Callable[[], bytes | Awaitable[bytes]]) -> AsyncIterator[None]:
    """A server whose methods have these answers, or those of these functions."""

    def handler(answer: bytes | Callable[[], bytes | Awaitable[bytes]]) -> grpc.RpcMethodHandler[Any, Any]:
        async def give(_request: Any, _context: object) -> bytes:
            found = answer if isinstance(answer, bytes) else answer()
            return found if isinstance(found, bytes) else await found

        return grpc.unary_unary_rpc_method_handler(give)

    server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
    handlers = {method: handler(answer) for method, answer in answers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def claim(driver: str, device: str, *names: str) -> pb.ClaimResource:
    """A device of a claim with these CDI names."""
    cdi = [pb.CDIDevice(name=name) for name in names]
    return pb.ClaimResource(driver_name=driver, pool_name="node-1", device_name=device, cdi_devices=cdi)


def pods_with_claim(
    *resources: pb.ClaimResource, containers: tuple[str, ...] = ("main",)
) -> pb.ListPodResourcesResponse:
    """The pod `team/pod`, whose containers share a claim with these devices."""
    dynamic = pb.DynamicResource(claim_name="c", claim_namespace="team", claim_resources=resources)
    items = [pb.ContainerResources(name=name, dynamic_resources=[dynamic]) for name in containers]
    return pb.ListPodResourcesResponse(pod_resources=[pb.PodResources(name="pod", namespace="team", containers=items)])
