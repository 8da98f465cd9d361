"""The kubelet's connection to one plugin. Error texts are those of a Go client, because pods' events show them.

The real kubelet sets no deadline on most calls; here each call has one, so that a plugin cannot block a test or a demo.
Connections are never shared: each registration opens a new one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from typing import TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import sockets

_OPTIONS = (
    *sockets.CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_SERVICE = "/v1beta1.DevicePlugin/"
# Go names of status codes that are not the camel case of the name.
_GO_NAMES: Mapping[str, str] = {"OK": "OK", "CANCELLED": "Canceled"}

_Response = TypeVar("_Response", bound=Message)


class PluginError(Exception):
    """A call to a plugin failed; the text is the kubelet's."""


class PluginConnection:
    """A connection to the plugin that serves `resource` at the socket `path`."""

    def __init__(self, resource: str, path: str, *, call_timeout: float) -> None:
        """Raises `sockets.SocketPathError`."""
        self.resource = resource
        self.path = path
        self._call_timeout = call_timeout
        self._channel = grpc.aio.insecure_channel(sockets.address(sockets.checked_path(path)), options=_OPTIONS)

    async def connect(self, seconds: float) -> None:
        """Waits until the plugin answers on its socket. Raises `PluginError` after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await _await_call(self._channel.channel_ready())
        except TimeoutError:
            raise PluginError("context deadline exceeded") from None

    async def options(self) -> pb.DevicePluginOptions:
        return await self._call("GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions)

    async def list_and_watch(self) -> AsyncIterator[pb.ListAndWatchResponse]:
        """The messages of ListAndWatch until the plugin ends the stream. Raises `PluginError`."""
        start = self._channel.unary_stream(
            f"{_SERVICE}ListAndWatch", request_serializer=pb.Empty.SerializeToString, response_deserializer=bytes
        )
        messages = aiter(start(pb.Empty()))
        while True:
            try:
                message: bytes = await _await_call(anext(messages))
            except StopAsyncIteration:
                return
            yield _decode(message, pb.ListAndWatchResponse)

    async def preferred_allocation(
        self, available: Collection[str], selected: Collection[str], size: int
    ) -> tuple[str, ...]:
        """The IDs of the first container response; empty if there is none."""
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=selected, allocation_size=size
        )
        response = await self._call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        return tuple(response.container_responses[0].deviceIDs) if response.container_responses else ()

    async def allocate(self, ids: Collection[str]) -> pb.ContainerAllocateResponse:
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=ids)
        response = await self._call("Allocate", request, pb.AllocateResponse)
        if not response.container_responses:
            raise PluginError("no containers return in allocation response")
        return response.container_responses[0]

    async def pre_start(self, ids: Collection[str]) -> None:
        await self._call(
            "PreStartContainer", pb.PreStartContainerRequest(devices_ids=ids), pb.PreStartContainerResponse
        )

    async def close(self) -> None:
        """Closes the connection; calls in progress fail."""
        await self._channel.close()

    async def _call(self, method: str, request: Message, response_type: type[_Response]) -> _Response:
        # Answers are decoded here, because gRPC returns None for an invalid one.
        call = self._channel.unary_unary(
            _SERVICE + method, request_serializer=type(request).SerializeToString, response_deserializer=bytes
        )
        try:
            data: bytes = await _await_call(call(request, timeout=self._call_timeout))
        except grpc.aio.UsageError as error:
            raise PluginError(_status("CANCELLED", str(error))) from error
        return _decode(data, response_type)


_Result = TypeVar("_Result")


async def _await_call(call: Awaitable[_Result]) -> _Result:
    """The call's result. Raises `PluginError` if it fails."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise PluginError(_status(error.code().name, error.details() or "")) from error
    except asyncio.CancelledError:  # gRPC raises it for calls on a closed channel, too
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PluginError(_status("CANCELLED", "the client connection is closing")) from None


def _decode(data: bytes, response_type: type[_Response]) -> _Response:
    try:
        return response_type.FromString(data)
    except DecodeError as error:
        raise PluginError(_status("INTERNAL", f"grpc: failed to unmarshal the received message: {error}")) from error


def _status(code: str, details: str) -> str:
    name = _GO_NAMES.get(code) or "".join(word.capitalize() for word in code.split("_"))
    return f"rpc error: code = {name} desc = {details}"
