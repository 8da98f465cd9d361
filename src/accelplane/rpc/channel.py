"""The client: calls over one connection, which is opened when needed and reopened after a failure."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from typing import Self

from google.protobuf.message import DecodeError, Message

from accelplane.rpc import frames
from accelplane.rpc.connection import Connection
from accelplane.rpc.errors import Code, ConnectionFault, RpcError, StreamFault
from accelplane.rpc.frames import END_HEADERS, END_STREAM, HEADERS, MAX_WINDOW, Setting
from accelplane.rpc.headers import (
    EMPTY_TABLE,
    MAX_HEADERS,
    Headers,
    literal,
    response_error,
    status_error,
    timeout_field,
)
from accelplane.rpc.messages import MAX_MESSAGE, frame_message
from accelplane.rpc.methods import Response
from accelplane.rpc.stream import Stream

_CLOSED = "the channel is closed"
_INITIAL_FRAMES = frames.PREFACE + frames.settings({Setting.ENABLE_PUSH: 0, Setting.MAX_HEADER_LIST_SIZE: MAX_HEADERS})
_BEFORE_PATH = EMPTY_TABLE + literal(b":method", b"POST") + literal(b":scheme", b"http")
_AFTER_PATH = (
    literal(b":authority", b"localhost") + literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
)


class Channel:
    """Makes calls on the socket at `path`. The connection is opened when needed and reopened after a failure."""

    def __init__(self, path: str, *, max_message: int = MAX_MESSAGE) -> None:
        self._path = path
        self._max_message = max_message
        self._connections: list[ClientConnection] = []  # new calls use the last one, the others finish their calls
        self._connecting = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        async with self._connecting:  # a connect in progress ends first
            await asyncio.sleep(0)  # the event loop closes transports in its next iteration

    def close(self) -> None:
        """Closes the channel for good. Calls in progress and later calls raise `RpcError` with code UNAVAILABLE."""
        self._closed = True
        for connection in self._connections:
            connection.end(_CLOSED, now=True)
        self._connections.clear()

    async def call(self, method: str, request: Message, response_type: type[Response], *, deadline: float) -> Response:
        """Returns the response to a unary call. Raises `RpcError`, also after `deadline` seconds."""
        with _rpc_errors(deadline):
            async with asyncio.timeout(deadline), self._open_call(method, request, deadline) as call:
                return response_type.FromString(await call.receive_one())

    async def call_all(
        self, calls: Sequence[tuple[str, Message, type[Response]]], *, deadline: float, read_delay: float = 0.0
    ) -> list[Response | RpcError]:
        """Returns the responses to concurrent unary calls, or their errors, in the order of the calls.

        For periodic calls, which should cost little: they need no tasks, one write sends the requests, and after
        `read_delay` seconds one read can return all responses. Raises `RpcError` if the requests cannot be sent.
        """
        opened: list[_ClientCall] = []
        timer = asyncio.get_running_loop().call_later(deadline, lambda: [call.expire(deadline) for call in opened])
        try:
            with _rpc_errors(deadline):
                async with asyncio.timeout(deadline):
                    for method, request, _ in calls:
                        connection = await self._open_connection()
                        connection.delay_writing()
                        message = frame_message(request.SerializeToString())
                        opened.append(connection.open_call(method, message, deadline, self._max_message))
                    if read_delay:
                        await (await self._open_connection()).delay_reading(read_delay)
            return [await _result(call, response) for call, (_, _, response) in zip(opened, calls, strict=True)]
        finally:
            timer.cancel()
            for call in opened:
                call.cancel()

    async def stream(self, method: str, request: Message, response_type: type[Response]) -> AsyncIterator[Response]:
        """Yields the responses to one request until the server ends the stream. Raises `RpcError`."""
        with _rpc_errors(None):
            async with self._open_call(method, request, None) as call:
                while (data := await call.receive()) is not None:
                    yield response_type.FromString(data)

    @contextlib.asynccontextmanager
    async def _open_call(self, method: str, request: Message, deadline: float | None) -> AsyncGenerator["_ClientCall"]:
        """Sends the request. Cancels the call at the end if it has not ended."""
        connection = await self._open_connection()
        call = connection.open_call(method, frame_message(request.SerializeToString()), deadline, self._max_message)
        try:
            yield call
        finally:
            call.cancel()

    async def _open_connection(self) -> "ClientConnection":
        """Returns a connection that accepts another stream. Raises `RpcError` or `OSError`."""
        async with self._connecting:
            if self._closed:
                raise RpcError("UNAVAILABLE", _CLOSED)
            connection = self._connections[-1] if self._connections else None
            if connection is None or connection.ended or connection.draining:
                connection = await self._connect()
        await connection.wait_for_stream()
        return connection

    async def _connect(self) -> "ClientConnection":
        for old in self._connections:
            if old.ended:
                old.end("connection ended", now=True)  # a server that does not read keeps the descriptor open otherwise
        connection = ClientConnection()
        # Listed before it is connected, so that `close` ends it; its transport is then aborted when it is made.
        self._connections = [*(old for old in self._connections if not old.ended), connection]
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, self._path)
        except BaseException:
            connection.end("connect failed")
            raise
        return connection


class ClientConnection(Connection["_ClientCall"]):
    def __init__(self) -> None:
        super().__init__(_INITIAL_FRAMES, b"")
        self.last_stream = -1
        self._stream_available = asyncio.Event()
        self._end_reason = ""
        self._flush_scheduled = False

    def open_call(self, method: str, message: bytes, deadline: float | None, max_message: int) -> "_ClientCall":
        """Opens a stream and sends the request on it."""
        self.last_stream += 2
        call = _ClientCall(self, self.last_stream, max_message)
        self.streams[call.id] = call
        fields = _BEFORE_PATH + literal(b":path", method.encode()) + _AFTER_PATH
        if deadline is not None:
            fields += timeout_field(deadline)
        before = frames.frame(HEADERS, END_HEADERS, call.id, fields)
        after = frames.frame(frames.DATA, END_STREAM, call.id)
        self.outbox.send(call, message, before=before, after=after)
        return call

    def delay_writing(self) -> None:
        """Collects frames for one write in the next iteration of the event loop."""
        self.outbox.cork()
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.outbox.uncork()

    async def delay_reading(self, seconds: float) -> None:
        self.outbox.pause_reading()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.outbox.resume_reading()

    async def wait_for_stream(self) -> None:
        """Waits until the server reads and accepts another stream. Raises `RpcError`."""
        while (
            not self.ended
            and not self.draining
            and (self.outbox.write_paused or len(self.streams) >= self.max_peer_streams)
        ):
            self._stream_available.clear()
            await self._stream_available.wait()
        if self.ended or self.draining or self.last_stream >= MAX_WINDOW - 1:
            raise RpcError("UNAVAILABLE", self._end_reason or "connection lost")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stream_available.set()

    def remove_stream(self, stream: Stream) -> None:
        super().remove_stream(stream)
        self._stream_available.set()

    def end(self, text: str, *, now: bool = False) -> None:
        self._end_reason = self._end_reason or text
        super().end(text, now=now)
        self._stream_available.set()

    def on_goaway(self, last_stream: int, reason: str) -> None:
        self.draining = True
        for call in tuple(self.streams.values()):
            if call.id > last_stream:
                self.remove_stream(call)
                call.on_closed(RpcError("UNAVAILABLE", f"the server closes the connection: {reason}"))
        self._stream_available.set()
        self.end_if_idle()

    def on_headers_start(self, stream_id: int) -> None:
        if stream_id % 2 == 0 or stream_id > self.last_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"headers for stream {stream_id}, which is not open")

    def on_headers(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        call = self.streams.get(stream_id)
        if call is None:
            self.flood_limit.consume()  # of a cancelled call
        else:
            call.on_headers(headers, ended=ended)


class _ClientCall(Stream):
    """A call on the client: its received messages, and its status."""

    def __init__(self, connection: ClientConnection, stream_id: int, max_message: int) -> None:
        super().__init__(stream_id, connection.initial_window, max_message)
        self._connection = connection
        self._headers_received = False
        self._messages: deque[bytes] = deque()
        self._ended = False
        self._error: RpcError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> bytes | None:
        """Returns the next message, None at the end. Raises `RpcError`."""
        while not self._messages and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._messages:
            message = self._messages.popleft()
            if not self._ended:
                self._connection.return_window(self)
            return message
        if self._error is not None:
            raise self._error
        return None

    async def receive_one(self) -> bytes:
        """Returns the only message of the response. Raises `RpcError`."""
        message = await self.receive()
        if message is None:
            raise RpcError("INTERNAL", "no message in the response")
        if await self.receive() is not None:
            raise RpcError("INTERNAL", "more than one message in the response")
        return message

    def expire(self, deadline: float) -> None:
        """Fails, unless the call has ended."""
        if not self._ended:
            self.fail(RpcError("DEADLINE_EXCEEDED", f"no response within {deadline:g} s"))

    def cancel(self) -> None:
        """Resets the stream, unless the call has ended."""
        if not self._ended:
            self._connection.reset_stream(self.id, Code.CANCEL)

    @property
    def accepts_data(self) -> bool:
        return not self._messages

    def on_headers(self, headers: Headers, *, ended: bool) -> None:
        """Headers or trailers were received. Raises `StreamFault`."""
        if self.remote_ended:
            raise StreamFault(Code.STREAM_CLOSED, "headers after the end")
        if not self._headers_received:
            if headers.get(b":status", b"").startswith(b"1") and not ended:
                return  # informational; the response follows
            self._headers_received = True
            if error := response_error(headers):
                self.fail(error)
                return
        elif not ended:
            raise StreamFault(Code.PROTOCOL_ERROR, "headers between data")
        if ended:
            self.remote_ended = True
            self._finish(status_error(headers))

    def on_messages(self, messages: list[bytes]) -> None:
        if not self._headers_received:
            raise StreamFault(Code.PROTOCOL_ERROR, "data before headers")
        self._messages.extend(messages)
        if self.remote_ended:
            self._finish(RpcError("UNKNOWN", "the response ended without a status"))
        elif messages:
            self._wake()

    def on_sent(self) -> None:
        """The request is sent. The response decides how the call ends."""

    def fail(self, error: RpcError) -> None:
        self.on_closed(error)
        self._connection.reset_stream(self.id, Code.CANCEL)

    def _finish(self, error: RpcError | None) -> None:
        """The server has ended the stream."""
        if error is None and self.reader.pending:
            error = RpcError("INTERNAL", "the stream ended within a message")
        self.on_closed(error)
        if self.unsent:  # the server does not need the rest of the request
            self._connection.reset_stream(self.id, Code.NO_ERROR)
        else:
            self._connection.remove_stream(self)

    def on_closed(self, error: RpcError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _result(call: _ClientCall, response_type: type[Response]) -> Response | RpcError:
    try:
        with _rpc_errors(None):
            return response_type.FromString(await call.receive_one())
    except RpcError as error:
        return error


@contextlib.contextmanager
def _rpc_errors(deadline: float | None) -> Generator[None]:
    """Translates exceptions to `RpcError`."""
    try:
        yield
    except TimeoutError as error:
        raise RpcError("DEADLINE_EXCEEDED", f"no response within {deadline or 0:g} s") from error
    except OSError as error:
        raise RpcError("UNAVAILABLE", error.strerror or str(error)) from error
    except DecodeError as error:
        raise RpcError("INTERNAL", f"cannot decode the response: {error}") from error
