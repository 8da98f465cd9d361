"""Methods of a server: functions over protobuf messages, wrapped as functions over bytes."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from accelplane.rpc.errors import RpcError

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Send = Callable[[bytes], Awaitable[None]]


class Method(Struct, frozen=True):
    """A method's handler: sends responses with `Send`, and may return the last one, which saves a write.

    A method that `streams` may run without end, so server shutdown does not wait for it.
    """

    handler: Callable[[bytes, Send], Awaitable[bytes | None]]
    streams: bool


def unary(
    request_type: type[Request], response_type: type[Response], answer: Callable[[Request], Awaitable[Response]]
) -> Method:
    """A method with one request and one response. An `RpcError` of `answer` becomes the call's status."""

    async def handle(data: bytes, _send: Send) -> bytes:
        response = await answer(_parse(data, request_type))
        return response.SerializeToString()

    return Method(handle, streams=False)


def streaming(
    request_type: type[Request],
    response_type: type[Response],
    answer: Callable[[Request], AsyncGenerator[Response, None]],
) -> Method:
    """A method with one request and a stream of responses. The generator is closed when the call ends."""

    async def handle(data: bytes, send: Send) -> None:
        async with contextlib.aclosing(answer(_parse(data, request_type))) as responses:
            async for response in responses:
                await send(response.SerializeToString())

    return Method(handle, streams=True)


def _parse(data: bytes, request_type: type[Request]) -> Request:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        text = f"cannot decode the request, expected {request_type.DESCRIPTOR.name}"
        raise RpcError("INVALID_ARGUMENT", text) from error
