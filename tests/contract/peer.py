"""A kubelet's client of a plugin, with grpcio."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.sockets import CHANNEL_OPTIONS, address

SERVICE = "/v1beta1.DevicePlugin/"


class Peer:
    """A client of the plugin at the socket `path`. Failed calls raise `grpc.aio.AioRpcError`."""

    def __init__(self, path: str, *options: tuple[str, Any]) -> None:
        defaults = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.insecure_channel(address(path), options=(*defaults, *options))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, method: str, request: Any, response_type: Any, **more: Any) -> Any:
        """One call; `request` is a message, or bytes that are sent unchanged."""
        call = self._channel.unary_unary(
            method if method.startswith("/") else SERVICE + method,
            request_serializer=lambda data: data if isinstance(data, bytes) else data.SerializeToString(),
            response_deserializer=response_type.FromString,
        )
        return await call(request, timeout=10, **more)

    async def options(self) -> pb.DevicePluginOptions:
        return await self.call("GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions)

    async def allocate(self, *containers: Sequence[str], **more: Any) -> Sequence[pb.ContainerAllocateResponse]:
        """The responses for containers with these IDs."""
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        )
        return (await self.call("Allocate", request, pb.AllocateResponse, **more)).container_responses

    async def preferred(self, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size)
        answer = await self.call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        return list(answer.container_responses[0].deviceIDs)

    async def pre_start(self, ids: Sequence[str]) -> None:
        request = pb.PreStartContainerRequest(devices_ids=ids)
        await self.call("PreStartContainer", request, pb.PreStartContainerResponse)

    def stream(self) -> Any:
        """The call of `ListAndWatch`."""
        return self._channel.unary_stream(
            f"{SERVICE}ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )(pb.Empty())

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator["Lists"]:
        """An open `ListAndWatch`."""
        call = self.stream()
        try:
            yield Lists(call)
        finally:
            call.cancel()


class Lists:
    """The lists of one stream, one by one."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def message(self) -> pb.ListAndWatchResponse | None:
        """The next list as it was sent, None at the end of the stream."""
        async with asyncio.timeout(10):
            message = await self._call.read()
        return None if message is grpc.aio.EOF else message

    async def next(self) -> Mapping[str, str] | None:
        """The next list as id to health, None at the end of the stream."""
        message = await self.message()
        return None if message is None else {device.ID: device.health for device in message.devices}

    async def until(self, expected: Mapping[str, str]) -> None:
        """Reads lists until one matches `wanted`."""
        observations: list[Mapping[str, str] | None] = []
        while not observations or observations[-1] != expected:
            observations.append(await self.next())
            assert observations[-1] is not None, f"the stream ended after {observations}"

    async def code(self) -> str:
        """How the stream ended."""
        return (await self._call.code()).name


async def refusal(call: Any) -> tuple[str, str]:
    """The status and the text with which a call fails."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call did not fail")
