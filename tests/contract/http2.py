"""An HTTP/2 peer that sends any frames, and decodes responses with an independent implementation.

Its frames are built byte by byte, so that they can be invalid; hyperframe and hpack decode the responses.
"""

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
)
from waiting import until

from accelplane import rpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS, PADDED, WITH_PRIORITY = 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11

CALL = (
    (":method", "POST"), (":scheme", "http"), (":path", "/t.T/Echo"), (":authority", "localhost"),
    ("te", "trailers"), ("content-type", "application/grpc"),
)  # fmt: skip


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def setting(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def message(content: bytes = b"", *, compressed: int = 0) -> bytes:
    """A gRPC message that holds a `BytesValue`."""
    data = BytesValue(value=content).SerializeToString()
    return struct.pack(">BI", compressed, len(data)) + data


def block(**changes: str | None) -> bytes:
    """The headers of a call of Echo; changes by name, `path="…"` for `:path`, None to leave one out."""
    settings_changes = {name.replace("_", "-"): value for name, value in changes.items()}
    fields = [(name, settings_changes.pop(name.lstrip(":"), value)) for name, value in CALL]
    fields += settings_changes.items()
    return Encoder().encode([(name, value) for name, value in fields if value is not None], huffman=False)


def call(stream: int = 1, content: bytes = b"", **changes: str | None) -> bytes:
    """The frames of a call: headers and one message."""
    return frame(HEADERS, END_HEADERS, stream, block(**changes)) + frame(DATA, END_STREAM, stream, message(content))


OPEN = frame(HEADERS, END_HEADERS, 1, block())  # a call whose message is to come


class Answer:
    """The received data of one stream."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.data = b""
        self.reset: int | None = None
        self.ended = False

    @property
    def status(self) -> str | None:
        return self.headers.get("grpc-status")


class Raw:
    """The peer of a connection: sends and receives frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.seen: list[Frame] = []
        self.decoder = Decoder()
        self.sent: dict[int, int] = {}  # data, by stream and in all
        self.answers: defaultdict[int, Answer] = defaultdict(Answer)

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, path: str, *first: bytes) -> AsyncIterator[Self]:
        """A client connection, which has sent the preface unless `hello` is given."""
        reader, writer = await asyncio.open_unix_connection(path)
        raw = cls(reader, writer)
        try:
            await raw.send(*(first or (PREFACE, setting())))
            yield raw
        finally:
            await raw.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def next(self) -> Frame | None:
        """The next frame, None at the end."""
        try:
            async with asyncio.timeout(10):
                head = await self.reader.readexactly(9)
                found, length = Frame.parse_frame_header(memoryview(head))
                found.parse_body(memoryview(await self.reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self.seen.append(found)
        answer = self.answers[found.stream_id]
        if isinstance(found, HeadersFrame):
            answer.headers |= {str(name): str(value) for name, value in self.decoder.decode(found.data)}
        if isinstance(found, DataFrame):
            answer.data += found.data
        if isinstance(found, RstStreamFrame):
            answer.reset = found.error_code
        answer.ended |= "END_STREAM" in found.flags or isinstance(found, RstStreamFrame)
        return found

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """The next frame that matches `wanted`."""
        while (found := await self.next()) is not None:
            if condition(found):
                return found
        raise AssertionError(f"the connection ended after {self.seen}")

    async def received_bytes(self, stream: int, size: int) -> int:
        """Waits for this amount of data; returns the received amount."""
        while len(self.answers[stream].data) < size:
            assert await self.next() is not None, f"the connection ended after {self.seen}"
        return len(self.answers[stream].data)

    async def assert_open(self) -> None:
        """Asserts that the connection is open."""
        await self.send(frame(PING, 0, 0, b"are you?"))
        await self.until(lambda one: isinstance(one, PingFrame) and one.opaque_data == b"are you?")

    async def goaway_code(self) -> int | None:
        """The error code of the GOAWAY with which the connection ends, None when it ends without."""
        while await self.next() is not None:
            pass
        codes = [one.error_code for one in self.seen if isinstance(one, GoAwayFrame)]
        return codes[-1] if codes else None

    async def answer(self, stream: int = 1) -> Answer:
        """The data of a stream until its end."""
        while not self.answers[stream].ended:
            assert await self.next() is not None, f"the connection ended after {self.seen}"
        return self.answers[stream]


class Methods:
    """A server of a few methods over `BytesValue`, and the results of their calls."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running = 0
        self.cancelled = 0
        self.sent = 0
        both = (BytesValue, BytesValue)
        self.table = {
            "/t.T/Echo": rpc.unary(*both, self._echo),
            "/t.T/Wait": rpc.unary(*both, self._wait),
            "/t.T/Timeout": rpc.unary(*both, self._time_out),
            "/t.T/Fail": rpc.unary(*both, self._fail),
            "/t.T/Refuse": rpc.unary(*both, self._refuse),
            "/t.T/Big": rpc.unary(*both, self._big),
            "/t.T/Count": rpc.streaming(*both, self._count),
            "/t.T/Watch": rpc.streaming(*both, self._watch),
            "/t.T/Flood": rpc.streaming(*both, self._flood),
        }
        self.server = rpc.RpcServer(self.table)

    async def _echo(self, request: BytesValue) -> BytesValue:
        return request

    async def _wait(self, request: BytesValue) -> BytesValue:
        with self._counted():
            await self.release.wait()
        return request

    async def _time_out(self, _request: BytesValue) -> BytesValue:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            task = asyncio.current_task()
            return BytesValue(value=b"in a task" if task and not task.cancelling() else b"?")
        raise AssertionError

    async def _fail(self, _request: BytesValue) -> BytesValue:
        raise ValueError("a secret")

    async def _refuse(self, request: BytesValue) -> BytesValue:
        raise rpc.RpcError("NOT_FOUND", request.value.decode())

    async def _big(self, request: BytesValue) -> BytesValue:
        return BytesValue(value=b"x" * int(request.value))

    async def _count(self, request: BytesValue) -> AsyncIterator[BytesValue]:
        for count in range(int(request.value)):
            yield BytesValue(value=str(count).encode())

    async def _watch(self, request: BytesValue) -> AsyncIterator[BytesValue]:
        with self._counted():
            yield request
            await asyncio.Event().wait()

    async def _flood(self, _request: BytesValue) -> AsyncIterator[BytesValue]:
        with self._counted():
            while True:
                yield BytesValue(value=b"x" * 10_000)
                self.sent += 10_000

    @contextlib.contextmanager
    def _counted(self) -> Any:
        self.running += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def serving(path: str) -> AsyncIterator[Methods]:
    """`Methods` at a socket; asserts at the end that the event loop had no unhandled errors."""
    unexpected: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: unexpected.append(context))
    methods = Methods()
    await methods.server.start(path)
    try:
        yield methods
    finally:
        await methods.server.stop()
    await until(lambda: methods.running == 0)
    assert unexpected == []
