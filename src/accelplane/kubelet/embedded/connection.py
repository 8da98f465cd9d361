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
        self._channel = open_channel(path)

    async def connect(self, seconds: float) -> None:
        """Waits until the plugin answers on its socket. Raises `PluginError` after `seconds`."""
        await connect(self._channel, seconds)

    async def options(self) -> pb.DevicePluginOptions:
        return await self._call("GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions)

    def list_and_watch(self) -> AsyncIterator[pb.ListAndWatchResponse]:
        """The messages of ListAndWatch until the plugin ends the stream. Raises `PluginError`."""
        return stream(self._channel, f"{_SERVICE}ListAndWatch", pb.Empty(), pb.ListAndWatchResponse)

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
        return await call(self._channel, _SERVICE + method, request, response_type, self._call_timeout)


async def call(
    channel: grpc.aio.Channel, path: str, request: Message, response_type: type[_Response], seconds: float
) -> _Response:
    """The response to a unary call. Raises `PluginError`, also after `seconds`."""
    # Answers are decoded here, because gRPC returns None for an invalid one.
    start = channel.unary_unary(path, request_serializer=type(request).SerializeToString, response_deserializer=bytes)
    try:
        data: bytes = await _await_call(start(request, timeout=seconds))
    except grpc.aio.UsageError as error:
        raise PluginError(_status("CANCELLED", str(error))) from error
    return _decode(data, response_type)


async def stream(
    channel: grpc.aio.Channel, path: str, request: Message, response_type: type[_Response]
) -> AsyncIterator[_Response]:
    """The messages of a stream until the plugin ends it. Raises `PluginError`."""
    start = channel.unary_stream(path, request_serializer=type(request).SerializeToString, response_deserializer=bytes)
    started = start(request)
    while True:
        read = asyncio.ensure_future(_await_call(started.read()))
        try:
            message = await asyncio.shield(read)
        except asyncio.CancelledError:
            # grpcio never closes the connection of a call whose pending read is cancelled before the call.
            started.cancel()
            await asyncio.wait((read,))
            read.exception()
            raise
        if not isinstance(message, bytes):  # the end of the stream
            return
        yield _decode(message, response_type)


def open_channel(path: str, *, attempt: float = 0.1) -> grpc.aio.Channel:
    """A channel to the socket `path`. Each attempt to connect has `attempt` seconds at least.

    Raises `sockets.SocketPathError`.
    """
    # The name is misleading: it is the time limit of an attempt.
    options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", round(attempt * 1000)))
    return grpc.aio.insecure_channel(sockets.address(sockets.checked_path(path)), options=options)


async def connect(channel: grpc.aio.Channel, seconds: float) -> None:
    """Waits until the plugin answers on its socket. Raises `PluginError` after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await _await_call(channel.channel_ready())
    except TimeoutError:
        raise PluginError("context deadline exceeded") from None


_Result = TypeVar("_Result")


async def _await_call(call: Awaitable[_Result]) -> _Result:
    """The call's result. Raises `PluginError` if it fails."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise PluginError(_status(error.code().name, error.details() or "")) from error
    except asyncio.CancelledError:  # gRPC raises it for calls on a closed channel, too
        if _task_is_cancelled():
            raise
        raise PluginError(_status("CANCELLED", "the client connection is closing")) from None


def _task_is_cancelled() -> bool:
    # A variable in the caller would be a reference cycle, which keeps the call and its connection.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _decode(data: bytes, response_type: type[_Response]) -> _Response:
    try:
        return response_type.FromString(data)
    except DecodeError as error:
        raise PluginError(_status("INTERNAL", f"grpc: failed to unmarshal the received message: {error}")) from error


def _status(code: str, details: str) -> str:
    name = _GO_NAMES.get(code) or "".join(word.capitalize() for word in code.split("_"))
    return f"rpc error: code = {name} desc = {details}"
