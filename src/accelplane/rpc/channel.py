"""The client: calls over one connection, which is made when needed, and again when lost."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Self

from google.protobuf.message import DecodeError, Message

from accelplane.rpc import frames
from accelplane.rpc.connection import Connection
from accelplane.rpc.errors import Code, ConnectionFault, RpcError, StreamFault
from accelplane.rpc.frames import END_HEADERS, END_STREAM, HEADERS, MAX_WINDOW, Setting
from accelplane.rpc.headers import MAX_HEADERS, NO_TABLE, Headers, literal, read_refusal, read_status, timeout_field
from accelplane.rpc.messages import MAX_MESSAGE, framed
from accelplane.rpc.methods import Response
from accelplane.rpc.stream import Stream

_CLOSED = "the channel is closed"
_HELLO = frames.PREFACE + frames.settings({Setting.ENABLE_PUSH: 0, Setting.MAX_HEADER_LIST_SIZE: MAX_HEADERS})
_BEFORE_PATH = NO_TABLE + literal(b":method", b"POST") + literal(b":scheme", b"http")
_AFTER_PATH = (
    literal(b":authority", b"localhost") + literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
)


class Channel:
    """Calls on the socket at `path`, over one connection that is made when needed, and again when lost."""

    def __init__(self, path: str, *, max_message: int = MAX_MESSAGE) -> None:
        self._path = path
        self._max_message = max_message
        self._connections: list[ClientConnection] = []  # the last one takes calls, the others finish theirs
        self._connecting = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        async with self._connecting:  # a connect in progress ends first
            await asyncio.sleep(0)  # the event loop closes transports in its next iteration

    def close(self) -> None:
        """Closes the connections for good. Calls in progress and all later ones raise `RpcError` (UNAVAILABLE)."""
        self._closed = True
        for connection in self._connections:
            connection.end(_CLOSED, now=True)
        self._connections.clear()

    async def call(self, method: str, request: Message, response_type: type[Response], *, deadline: float) -> Response:
        """The response to one request. Raises `RpcError`, also when `deadline` seconds pass."""
        with _explained(deadline):
            async with asyncio.timeout(deadline), self._answer(method, request, deadline) as answer:
                data = await answer.next()
                if data is None:
                    raise RpcError("INTERNAL", "no message in the answer")
                if await answer.next() is not None:
                    raise RpcError("INTERNAL", "more than one message in the answer")
                return response_type.FromString(data)

    async def stream(self, method: str, request: Message, response_type: type[Response]) -> AsyncIterator[Response]:
        """The responses to one request, until the server ends them. Raises `RpcError`."""
        with _explained(None):
            async with self._answer(method, request, None) as answer:
                while (data := await answer.next()) is not None:
                    yield response_type.FromString(data)

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, request: Message, deadline: float | None) -> AsyncGenerator["_Answer"]:
        """A call that has been made; given up at the end, if it still goes on."""
        connection = await self._connected()
        answer = connection.open(method, framed(request.SerializeToString()), deadline, self._max_message)
        try:
            yield answer
        finally:
            answer.give_up()

    async def _connected(self) -> "ClientConnection":
        """A connection that takes another stream. Raises `RpcError` or `OSError`."""
        async with self._connecting:
            if self._closed:
                raise RpcError("UNAVAILABLE", _CLOSED)
            connection = self._connections[-1] if self._connections else None
            if connection is None or connection.ended or connection.leaving:
                connection = await self._connect()
        await connection.room()
        return connection

    async def _connect(self) -> "ClientConnection":
        for old in self._connections:
            if old.ended:
                old.end("connection ended", now=True)  # a server that reads nothing would keep the descriptor open
        connection = ClientConnection()
        # Listed before it is connected, so that `close` ends it; its transport is then aborted when it is made.
        self._connections = [*(old for old in self._connections if not old.ended), connection]
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, self._path)
        except BaseException:
            connection.end("connect failed")
            raise
        return connection


class ClientConnection(Connection["_Answer"]):
    """A connection to a server."""

    def __init__(self) -> None:
        super().__init__(_HELLO, b"")
        self.last_stream = -1
        self._room = asyncio.Event()
        self._end_reason = ""

    def open(self, method: str, message: bytes, deadline: float | None, max_message: int) -> "_Answer":
        """Makes a call."""
        self.last_stream += 2
        answer = _Answer(self, self.last_stream, max_message)
        self.streams[answer.id] = answer
        fields = _BEFORE_PATH + literal(b":path", method.encode()) + _AFTER_PATH
        if deadline is not None:
            fields += timeout_field(deadline)
        before = frames.frame(HEADERS, END_HEADERS, answer.id, fields)
        after = frames.frame(frames.DATA, END_STREAM, answer.id)
        self.outbox.send(answer, message, before=before, after=after)
        return answer

    async def room(self) -> None:
        """Waits until the server reads and takes another stream. Raises `RpcError`."""
        while (
            not self.ended and not self.leaving and (self.outbox.write_paused or len(self.streams) >= self.peer_streams)
        ):
            self._room.clear()
            await self._room.wait()
        if self.ended or self.leaving or self.last_stream >= MAX_WINDOW - 1:
            raise RpcError("UNAVAILABLE", self._end_reason or "connection lost")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._room.set()

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        self._room.set()

    def end(self, text: str, *, now: bool = False) -> None:
        self._end_reason = self._end_reason or text
        super().end(text, now=now)
        self._room.set()

    def goaway(self, code: Code, text: str = "") -> bytes:
        return frames.goaway(0, code, text)  # which counts streams of the server, which may open none

    def goaway_came(self, last_stream: int, reason: str) -> None:
        self.leaving = True
        for answer in tuple(self.streams.values()):
            if answer.id > last_stream:
                self.forget(answer)
                answer.lost(RpcError("UNAVAILABLE", f"the server leaves: {reason}"))
        self._room.set()
        self.end_when_done()

    def headers_begin(self, stream_id: int) -> None:
        if stream_id % 2 == 0 or stream_id > self.last_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"headers for stream {stream_id}, which was not opened")

    def headers_came(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        answer = self.streams.get(stream_id)
        if answer is None:
            self.patience.spend()  # given up before
        else:
            answer.headers_came(headers, ended=ended)


class _Answer(Stream):
    """What a server answers to one call."""

    def __init__(self, connection: ClientConnection, stream_id: int, max_message: int) -> None:
        super().__init__(stream_id, connection.initial_window, max_message)
        self._connection = connection
        self._begun = False  # its headers have come
        self._messages: deque[bytes] = deque()
        self._over = False
        self._error: RpcError | None = None
        self._news: asyncio.Future[None] | None = None

    async def next(self) -> bytes | None:
        """The next message, None at the end. Raises `RpcError`."""
        while not self._messages and not self._over:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if self._messages:
            message = self._messages.popleft()
            if not self._over:
                self._connection.return_window(self)
            return message
        if self._error is not None:
            raise self._error
        return None

    def give_up(self) -> None:
        if not self._over:
            self._connection.reset(self.id, Code.CANCEL)

    @property
    def takes_more(self) -> bool:
        return not self._messages

    def headers_came(self, headers: Headers, *, ended: bool) -> None:
        """Headers or trailers. Raises `StreamFault`."""
        if self.remote_ended:
            raise StreamFault(Code.STREAM_CLOSED, "headers after the end")
        if not self._begun:
            if headers.get(b":status", b"").startswith(b"1") and not ended:
                return  # informational; the answer follows
            self._begun = True
            if error := read_refusal(headers):
                self.fail(error)
                return
        elif not ended:
            raise StreamFault(Code.PROTOCOL_ERROR, "headers between data")
        if ended:
            self.remote_ended = True
            self._finish(read_status(headers))

    def took(self, messages: list[bytes]) -> None:
        if not self._begun:
            raise StreamFault(Code.PROTOCOL_ERROR, "data before headers")
        self._messages.extend(messages)
        if self.remote_ended:
            self._finish(RpcError("UNKNOWN", "the answer ended without a status"))
        elif messages:
            self._wake()

    def sent(self) -> None:
        """The request is sent; only the answer counts."""

    def fail(self, error: RpcError) -> None:
        self._settle(error)
        self._connection.reset(self.id, Code.CANCEL)

    def lost(self, error: RpcError) -> None:
        self._settle(error)

    def _finish(self, error: RpcError | None) -> None:
        """The server is done."""
        if error is None and self.reader.pending:
            error = RpcError("INTERNAL", "the stream ended within a message")
        self._settle(error)
        if self.unsent:  # it did not want the whole request
            self._connection.reset(self.id, Code.NO_ERROR)
        else:
            self._connection.forget(self)

    def _settle(self, error: RpcError | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


@contextlib.contextmanager
def _explained(deadline: float | None) -> Generator[None]:
    try:
        yield
    except TimeoutError as error:
        raise RpcError("DEADLINE_EXCEEDED", f"no answer within {deadline or 0:g} s") from error
    except OSError as error:
        raise RpcError("UNAVAILABLE", error.strerror or str(error)) from error
    except DecodeError as error:
        raise RpcError("INTERNAL", f"the answer cannot be read: {error}") from error
