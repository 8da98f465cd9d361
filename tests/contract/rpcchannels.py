"""A gRPC server of scripted frames."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder
from http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, Raw, frame, message, setting

from accelplane.rpc import Channel, RpcError

Script = Callable[[Raw], Awaitable[object]]


def fields(*pairs: tuple[str, str]) -> bytes:
    return Encoder().encode(pairs)


BEGIN = fields((":status", "200"), ("content-type", "application/grpc"))
OK = fields(("grpc-status", "0"))


def begin(stream: int = 1) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, BEGIN)


def end(stream: int = 1, block: bytes = OK) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)


def good(stream: int = 1, content: bytes = b"fine") -> bytes:
    return begin(stream) + frame(DATA, 0, stream, message(content)) + end(stream)


class Double:
    """A server with one script for each connection; the last one serves all later ones."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.scripts: list[Script] = []
        self.raws: list[Raw] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            raw = Raw(reader, writer)
            self.raws.append(raw)
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, AssertionError):
                assert await reader.readexactly(len(PREFACE)) == PREFACE
                await script(raw)
            await raw.close()

        server = await asyncio.start_unix_server(serve, self.path)
        try:
            yield
        finally:
            server.close()
            for raw in self.raws:
                await raw.close()


def respond_with(*data: bytes) -> Script:
    """Answers every call with the same bytes, and keeps the connection open."""

    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: "END_STREAM" in one.flags)
        await raw.send(*data)
        while await raw.next() is not None:
            pass

    return script


async def call(channel: Channel, content: bytes = b"", deadline: float = 10) -> bytes:
    return (await channel.call("/t.T/Echo", BytesValue(value=content), BytesValue, deadline=deadline)).value


async def failure(channel: Channel, deadline: float = 10) -> tuple[str, str]:
    with pytest.raises(RpcError) as caught:
        await call(channel, deadline=deadline)
    return caught.value.code, caught.value.text


async def call_all(
    channel: Channel, *contents: bytes, deadline: float = 10, read_delay: float = 0.0
) -> list[bytes | tuple[str, str]]:
    """The values of the responses, or the code and text of the errors."""
    calls = [("/t.T/Echo", BytesValue(value=content), BytesValue) for content in contents]
    results = await channel.call_all(calls, deadline=deadline, read_delay=read_delay)
    return [(one.code, one.text) if isinstance(one, RpcError) else one.value for one in results]


@contextlib.asynccontextmanager
async def running_double(directory: str) -> AsyncIterator[Double]:
    """A double that listens in the directory. Asserts that no exception is left to the event loop."""
    unexpected: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unexpected.append(context))
    double = Double(f"{directory}/s")
    async with double.listening():
        yield double
    assert unexpected == []
