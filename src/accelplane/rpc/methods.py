"""What a server's methods are made of: functions over protobuf messages, made into functions over bytes."""

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
    """Answers a request's bytes: sends what responses there are, but returns the last one if it knows that it is.

    `streams` says that it may go on for ever, so that nobody waits for its end.
    """

    answer: Callable[[bytes, Send], Awaitable[bytes | None]]
    streams: bool


def unary(
    request_type: type[Request], response_type: type[Response], answer: Callable[[Request], Awaitable[Response]]
) -> Method:
    """A method with one request and one response. An `RpcError` of `answer` becomes the call's status."""

    async def handle(data: bytes, _send: Send) -> bytes:
        response = await answer(_parsed(data, request_type))
        return response.SerializeToString()

    return Method(handle, streams=False)


def streaming(
    request_type: type[Request],
    response_type: type[Response],
    answer: Callable[[Request], AsyncGenerator[Response, None]],
) -> Method:
    """A method with one request and a stream of responses; the iterator is closed when the client goes away."""

    async def handle(data: bytes, send: Send) -> None:
        async with contextlib.aclosing(answer(_parsed(data, request_type))) as responses:
            async for response in responses:
                await send(response.SerializeToString())

    return Method(handle, streams=True)


def _parsed(data: bytes, request_type: type[Request]) -> Request:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        raise RpcError("INVALID_ARGUMENT", f"the request is no {request_type.DESCRIPTOR.name}") from error
