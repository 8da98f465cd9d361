"""gRPC on Unix sockets for the node's processes, over grpclib: one thread, nothing periodic, a third of the memory.

What is added to the library: connections that end with their server (it leaves them open, so a kubelet would never
learn that its stream is over), a limit on the size of messages (it has none), and errors as one type.
"""

import asyncio
import contextlib
import struct
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Self, TypeVar

import grpclib
import grpclib.client
import grpclib.config
import grpclib.const
import grpclib.exceptions
import grpclib.protocol
import grpclib.server
import h2.config
import h2.exceptions
from google.protobuf.message import DecodeError, Message

MAX_MESSAGE = 4 * 1024 * 1024  # gRPC's default
# Three times as much when encoded; headers of 8 KiB are what every peer takes.
_MAX_STATUS_TEXT = 2048
_FAREWELL = 0.5  # seconds that a peer has to read what was sent before its connection ends

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


class RpcError(Exception):
    """A call failed: `code` is gRPC's name of the status (`UNAVAILABLE`), the text what the other side said of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class RpcServer:
    """Serves methods on a Unix socket until stopped."""

    def __init__(self, methods: Mapping[str, grpclib.const.Handler]) -> None:
        self._server = _Server(methods)
        self._started = False

    async def start(self, path: str) -> None:
        """Binds `path` and listens. Raises `OSError`."""
        await self._server.start(path=path)
        self._started = True

    async def stop(self) -> None:
        """Stops listening and ends every connection; handlers are cancelled. Nothing happens if it never started."""
        if not self._started:
            return
        self._server.close()
        connections = list(self._server.connections)
        for connection in connections:
            connection.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await asyncio.gather(*(connection.lost.wait() for connection in connections))
        for connection in connections:
            connection.abort()
        await asyncio.sleep(0)  # the transports' own end comes with the loop's next round
        await self._server.wait_closed()


def unary(
    request_type: type[Request], response_type: type[Response], answer: Callable[[Request], Awaitable[Response]]
) -> grpclib.const.Handler:
    """A method with one request and one response. An `RpcError` of `answer` becomes the call's status."""

    async def handle(stream: "grpclib.server.Stream[Request, Response]") -> None:
        with _as_status():
            await stream.send_message(await answer(await _request(stream, request_type)))

    return grpclib.const.Handler(handle, grpclib.const.Cardinality.UNARY_UNARY, request_type, response_type)


def streaming(
    request_type: type[Request],
    response_type: type[Response],
    answer: Callable[[Request], AsyncGenerator[Response, None]],
) -> grpclib.const.Handler:
    """A method with one request and a stream of responses; the iterator is closed when the client goes away."""

    async def handle(stream: "grpclib.server.Stream[Request, Response]") -> None:
        with _as_status():
            request = await _request(stream, request_type)
            async with contextlib.aclosing(answer(request)) as responses:
                async for response in responses:
                    await stream.send_message(response)

    return grpclib.const.Handler(handle, grpclib.const.Cardinality.UNARY_STREAM, request_type, response_type)


class Channel:
    """Calls on the socket at `path`, over one connection that is made when needed, and again when lost."""

    def __init__(self, path: str, *, max_message: int = MAX_MESSAGE) -> None:
        self._channel = grpclib.client.Channel(path=path)
        self._max_message = max_message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)  # the transport's own end comes with the loop's next round

    def close(self) -> None:
        self._channel.close()

    async def call(self, method: str, request: Message, response_type: type[Response], *, deadline: float) -> Response:
        """The response to one request. Raises `RpcError`, also when `deadline` seconds pass."""
        return await _apart(self._call(method, request, response_type, deadline))

    async def _call(self, method: str, request: Message, response_type: type[Response], deadline: float) -> Response:
        with _explained(deadline):
            async with (
                asyncio.timeout(deadline),
                self._channel.request(
                    method, grpclib.const.Cardinality.UNARY_UNARY, type(request), response_type, timeout=deadline
                ) as stream,
            ):
                await stream.send_message(request, end=True)
                await stream.recv_initial_metadata()
                response = await _response(stream, response_type, self._max_message)
        if response is None:
            raise RpcError("INTERNAL", "no message in the answer")
        return response

    async def stream(self, method: str, request: Message, response_type: type[Response]) -> AsyncIterator[Response]:
        """The responses to one request, until the server ends them. Raises `RpcError`."""
        with _explained(None):
            async with self._channel.request(
                method, grpclib.const.Cardinality.UNARY_STREAM, type(request), response_type
            ) as stream:
                await _apart(stream.send_message(request, end=True))
                await _apart(stream.recv_initial_metadata())
                while (response := await _apart(_response(stream, response_type, self._max_message))) is not None:
                    yield response


class _Server(grpclib.server.Server):
    """Remembers its connections, to end them when it stops."""

    def __init__(self, methods: Mapping[str, grpclib.const.Handler]) -> None:
        super().__init__([_Methods(methods)])
        self.connections: weakref.WeakSet[_Connection] = weakref.WeakSet()

    def _protocol_factory(self) -> grpclib.protocol.H2Protocol:
        usual = super()._protocol_factory()
        connection = _Connection(usual.handler, usual.config, usual.h2_config)
        self.connections.add(connection)
        return connection


class _Connection(grpclib.protocol.H2Protocol):
    """A connection that can be ended at any time: before it is made, and when its peer reads nothing."""

    def __init__(
        self,
        handler: grpclib.protocol.AbstractHandler,
        config: grpclib.config.Configuration,
        h2_config: h2.config.H2Configuration,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self.lost = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None
        self._ended = False

    def end(self) -> None:
        """Closes it once everything written is sent."""
        self._ended = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes it at once."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = transport
        if self._ended:
            transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._transport = None  # which no longer stands an `abort`
        self.lost.set()


class _Methods:
    """What grpclib calls a servable: anything that maps paths to handlers."""

    def __init__(self, methods: Mapping[str, grpclib.const.Handler]) -> None:
        self._methods = dict(methods)

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        return self._methods


async def _request(stream: "grpclib.server.Stream[Request, Response]", request_type: type[Request]) -> Request:
    try:
        request = await _received(stream, request_type, MAX_MESSAGE)
    except DecodeError as error:
        raise RpcError("INVALID_ARGUMENT", f"the request is no {request_type.DESCRIPTOR.name}") from error
    if request is None:
        raise RpcError("INVALID_ARGUMENT", "no message in the request")
    return request


async def _apart(steps: Coroutine[Any, Any, Result]) -> Result:
    """The result of `steps`, run in a task of their own.

    The library wakes a task by cancelling it, maybe more than once. A caller's task would keep the count, and the next
    `asyncio.timeout` around it would take its own expiry for a cancellation from outside.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    try:
        return await asyncio.create_task(steps)
    except BaseException as error:
        if task and task.cancelling() > cancels:
            raise asyncio.CancelledError from error
        if isinstance(error, asyncio.CancelledError):
            raise RpcError("UNAVAILABLE", "connection lost") from error
        raise


async def _response(
    stream: "grpclib.client.Stream[Any, Any]", response_type: type[Response], limit: int
) -> Response | None:
    """As `_received`, woken when the connection is lost, which the library does in its `recv_message` only."""
    with stream._wrapper:  # pyright: ignore[reportPrivateUsage]
        return await _received(stream, response_type, limit)


async def _received(
    stream: "grpclib.server.Stream[Any, Any] | grpclib.client.Stream[Any, Any]",
    message_type: type[Response],
    limit: int,
) -> Response | None:
    """The next message, None at the end. Raises `RpcError` for one that is compressed or longer than `limit`.

    The library's own `recv_message` would wait for up to 4 GiB, as the length in front of a message says.
    """
    raw: grpclib.protocol.Stream = stream._stream  # pyright: ignore[reportPrivateUsage]
    try:
        head = await raw.recv_data(5)
        if not head:
            return None
        compressed, length = struct.unpack(">BI", head)
        if compressed:
            raise RpcError("UNIMPLEMENTED", "compressed messages are not understood")
        if length > limit:
            raise RpcError("RESOURCE_EXHAUSTED", f"a message of {length} bytes, at most {limit} are taken")
        data = await raw.recv_data(length)
    except AssertionError as error:  # the library's word for a stream that ends too early
        raise RpcError("INTERNAL", "the stream ended within a message") from error
    return message_type.FromString(data)


@contextlib.contextmanager
def _as_status() -> Generator[None]:
    try:
        yield
    except RpcError as error:
        raise grpclib.GRPCError(grpclib.const.Status[error.code], _sendable(error.text)) from error


def _sendable(text: str) -> str:
    """`text` as a status can carry it: a peer drops headers that are too long, and what is no UTF-8 cannot be sent."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= _MAX_STATUS_TEXT:
        return data.decode()
    return data[:_MAX_STATUS_TEXT].decode("utf-8", "ignore") + "…"


@contextlib.contextmanager
def _explained(deadline: float | None) -> Generator[None]:
    try:
        yield
    except grpclib.GRPCError as error:
        raise RpcError(error.status.name, error.message or "") from error
    except grpclib.exceptions.StreamTerminatedError as error:
        raise RpcError("UNAVAILABLE", str(error)) from error
    except TimeoutError as error:
        raise RpcError("DEADLINE_EXCEEDED", f"no answer within {deadline:g} s") from error
    except OSError as error:
        raise RpcError("UNAVAILABLE", error.strerror or str(error)) from error
    except AttributeError as error:  # the library's word for a connection lost before its first request
        raise RpcError("UNAVAILABLE", "connection lost") from error
    except (DecodeError, struct.error, h2.exceptions.H2Error) as error:
        raise RpcError("INTERNAL", f"the answer cannot be read: {error}") from error
