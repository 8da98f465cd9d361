"""The client with servers that violate HTTP/2 and gRPC, or disconnect, and the errors of calls."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder
from http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    WINDOW_UPDATE,
    Raw,
    frame,
    message,
    number,
    serving,
    setting,
)
from hyperframe.frame import GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from waiting import until

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


@pytest.fixture
async def double(directory: str) -> AsyncIterator[Double]:
    unexpected: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unexpected.append(context))
    double = Double(f"{directory}/s")
    async with double.listening():
        yield double
    assert unexpected == []


@pytest.fixture
async def channel(double: Double) -> AsyncIterator[Channel]:
    async with Channel(double.path, max_message=1000) as channel:
        yield channel


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


# Requests


async def test_a_call_sends_headers_deadline_and_message(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with(good()))
    assert await call(channel, b"abc", deadline=2.5) == b"fine"
    (answer,) = [found for stream, found in double.raws[0].answers.items() if stream == 1]
    assert answer.data == message(b"abc")
    assert answer.headers == {
        ":method": "POST", ":scheme": "http", ":path": "/t.T/Echo", ":authority": "localhost", "te": "trailers",
        "content-type": "application/grpc", "grpc-timeout": "2500000u",
    }  # fmt: skip


async def test_a_long_request_waits_for_window_updates(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting((4, 0), (1, 0)))
        raw.decoder.max_allowed_table_size = 0
        await raw.until(lambda one: isinstance(one, HeadersFrame))
        await raw.send(frame(WINDOW_UPDATE, 0, 1, number(2**30)))
        # The connection's window is left.
        while len(raw.answers[1].data) < 65535:
            await raw.next()
        await raw.send(frame(WINDOW_UPDATE, 0, 0, number(2**30)))
        answer = await raw.answer()
        await raw.send(good(content=str(len(answer.data)).encode()))
        await raw.next()

    double.scripts.append(script)
    assert int(await call(channel, b"x" * 300_000)) == len(message(b"x" * 300_000))


async def test_a_response_before_the_whole_request_stops_the_request(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting((4, 0)))
        await raw.until(lambda one: isinstance(one, HeadersFrame))
        await raw.send(end(block=BEGIN + fields(("grpc-status", "8"), ("grpc-message", "too much"))))
        await raw.until(lambda one: isinstance(one, RstStreamFrame))
        await raw.send(setting((4, 65535)), frame(WINDOW_UPDATE, 0, 0, number(65535)))
        await raw.until(lambda one: one.stream_id == 3 and "END_STREAM" in one.flags)
        await raw.send(good(3))
        await raw.next()

    double.scripts.append(script)
    with pytest.raises(RpcError, match="RESOURCE_EXHAUSTED: too much"):
        await call(channel, b"x" * 300_000)
    assert await call(channel) == b"fine"


# Responses


@pytest.mark.parametrize(
    ("data", "code", "text"),
    {
        "a status in place of an answer": (
            end(block=BEGIN + fields(("grpc-status", "5"), ("grpc-message", "not%20%C2%ABthere%C2%BB%"))),
            "NOT_FOUND", "not «there»%",
        ),
        "a status after a message": (
            begin() + frame(DATA, 0, 1, message(b"x")) + end(block=fields(("grpc-status", "15"))), "DATA_LOSS", "",
        ),
        "a status that nobody knows": (end(block=BEGIN + fields(("grpc-status", "99"))), "UNKNOWN", ""),
        "a status that is no number": (end(block=BEGIN + fields(("grpc-status", "bad"))), "UNKNOWN", ""),
        "no status": (begin() + frame(DATA, END_STREAM, 1, message()), "UNKNOWN", "ended without a status"),
        "no status in trailers": (begin() + end(block=fields(("x", "y"))), "UNKNOWN", "ended without a status"),
        "no message": (begin() + end(), "INTERNAL", "no message in the response"),
        "two messages": (begin() + frame(DATA, 0, 1, message() * 2) + end(), "INTERNAL", "more than one message"),
        "half a message": (begin() + frame(DATA, 0, 1, message(b"abc")[:-1]) + end(), "INTERNAL", "within a message"),
        "no BytesValue": (
            begin() + frame(DATA, 0, 1, b"\0\0\0\0\1\xff") + end(), "INTERNAL", "cannot decode the response",
        ),
        "a compressed message": (
            begin() + frame(DATA, 0, 1, message(compressed=1)) + end(), "UNIMPLEMENTED", "compressed",
        ),
        "a long message": (
            begin() + frame(DATA, 0, 1, struct.pack(">BI", 0, 1001)),
            "RESOURCE_EXHAUSTED", "1001 bytes, expected at most 1000",
        ),
        "another page": (
            frame(HEADERS, END_HEADERS, 1, fields((":status", "404"), ("content-type", "text/html"))),
            "UNIMPLEMENTED", "HTTP status 404",
        ),
        "no time": (end(block=fields((":status", "503"))), "UNAVAILABLE", "HTTP status 503"),
        "no gRPC": (end(block=fields((":status", "200"), ("content-type", "text/html"))), "UNKNOWN", "text/html"),
        "no HTTP status": (end(block=fields(("content-type", "application/grpc"))), "UNKNOWN", "missing"),
        "refused": (frame(RST_STREAM, 0, 1, number(7)), "UNAVAILABLE", "REFUSED_STREAM"),
        "cancelled": (frame(RST_STREAM, 0, 1, number(8)), "CANCELLED", "CANCEL"),
        "reset oddly": (frame(RST_STREAM, 0, 1, number(4711)), "INTERNAL", "error 4711"),
        "data before headers": (frame(DATA, 0, 1, message()), "INTERNAL", "PROTOCOL_ERROR"),
        "bad headers": (frame(HEADERS, END_HEADERS, 1, fields(("Upper", "1"))), "INTERNAL", "PROTOCOL_ERROR"),
        "headers thrice": (begin() + begin(), "INTERNAL", "PROTOCOL_ERROR"),
    }.values(),
)  # fmt: skip
async def test_an_invalid_response_fails_only_its_call(
    double: Double, channel: Channel, data: bytes, code: str, text: str
) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: "END_STREAM" in one.flags)
        await raw.send(data)
        await raw.until(lambda one: one.stream_id == 3 and "END_STREAM" in one.flags)
        await raw.send(good(3))
        await raw.next()

    double.scripts.append(script)
    error = await failure(channel)
    assert (error[0], text in error[1]) == (code, True), error
    assert await call(channel) == b"fine"
    assert len(double.raws) == 1


@pytest.mark.parametrize(
    "data",
    {
        "informational headers": frame(HEADERS, END_HEADERS, 1, fields((":status", "103"), ("x", "y"))) + good(),
        "headers in pieces": frame(HEADERS, 0, 1, BEGIN[:3])
        + frame(CONTINUATION, END_HEADERS, 1, BEGIN[3:])
        + frame(DATA, 0, 1, message(b"fine"))
        + end(),
        "a message in pieces": begin()
        + b"".join(frame(DATA, 0, 1, message(b"fine")[at : at + 1]) for at in range(len(message(b"fine"))))
        + end(),
        "pings and settings": frame(PING, 0, 0, b"12345678") + setting((4, 100_000), (3, 5)) + good(),
        "a goodbye": frame(GOAWAY, 0, 0, number(2**31 - 1) + number(0)) + good(),
        "unknown frames": frame(0xEE) + frame(0xEF, 1, 1, b"?") + good(),
    }.values(),
)
async def test_a_response_between_other_frames_is_received(double: Double, channel: Channel, data: bytes) -> None:
    double.scripts.append(respond_with(data))
    assert await call(channel) == b"fine"


@pytest.mark.parametrize(
    ("data", "code"),
    {
        "a push": (frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + BEGIN), 1),
        "a stream of its own": (frame(HEADERS, END_HEADERS, 2, BEGIN), 1),
        "a stream that was not opened": (frame(HEADERS, END_HEADERS, 3, BEGIN), 1),
        "junk in headers": (frame(HEADERS, END_HEADERS, 1, b"\xff" * 9), 9),
        "no HTTP/2": (b"HTTP/1.1 400 Bad Request\r\n\r\n", 6),
        "a window of nothing": (frame(WINDOW_UPDATE, 0, 0, number(0)), 1),
        "pings without end": (frame(PING, 0, 0, b"12345678") * 5000, 11),
    }.values(),
)
async def test_a_protocol_error_of_the_server_closes_the_connection_and_reconnects(
    double: Double, channel: Channel, data: bytes, code: int
) -> None:
    double.scripts += [respond_with(data), respond_with(good())]
    assert (await failure(channel))[0] == "UNAVAILABLE"
    assert await call(channel) == b"fine"
    await until(lambda: any(isinstance(one, GoAwayFrame) for one in double.raws[0].seen))
    assert [one.error_code for one in double.raws[0].seen if isinstance(one, GoAwayFrame)] == [code]


# Missing servers


async def test_a_missing_socket_is_unavailable(directory: str) -> None:
    async with Channel(f"{directory}/none") as channel:
        assert await failure(channel) == ("UNAVAILABLE", "No such file or directory")


async def test_a_lost_connection_fails_its_calls_and_the_next_call_reconnects(double: Double, channel: Channel) -> None:
    async def lose_connection(raw: Raw) -> None:
        await raw.until(lambda one: "END_STREAM" in one.flags)

    double.scripts += [lose_connection, respond_with(good())]
    task = asyncio.current_task()
    assert await failure(channel) == ("UNAVAILABLE", "connection lost")
    assert task is not None
    assert task.cancelling() == 0
    assert await call(channel) == b"fine"


async def test_goaway_fails_unprocessed_calls(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: one.stream_id == 3 and "END_STREAM" in one.flags)
        await raw.send(frame(GOAWAY, 0, 0, number(1) + number(0) + b"for lunch"))
        await raw.send(good(1, b"last"))
        assert await raw.next() is None

    double.scripts += [script, respond_with(good())]
    one, three = await asyncio.gather(call(channel), call(channel), return_exceptions=True)
    assert one == b"last"
    assert str(three) == "UNAVAILABLE: the server closes the connection: NO_ERROR for lunch"
    assert await call(channel) == b"fine"
    assert len(double.raws) == 2


async def test_an_exceeded_deadline_resets_the_stream(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with())
    assert await failure(channel, deadline=0.02) == ("DEADLINE_EXCEEDED", "no response within 0.02 s")
    await until(lambda: double.raws[0].answers[1].reset == 8)


async def test_a_cancelled_call_resets_the_stream_and_ignores_a_late_response(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: isinstance(one, RstStreamFrame))
        await raw.send(good(1))
        await raw.until(lambda one: one.stream_id == 3 and "END_STREAM" in one.flags)
        await raw.send(good(3))
        await raw.next()

    double.scripts.append(script)
    task = asyncio.create_task(call(channel))
    await until(lambda: bool(double.raws) and double.raws[0].answers[1].ended)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await call(channel) == b"fine"


async def test_concurrent_calls_are_limited_by_the_servers_settings(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting((3, 1)))
        for stream in (1, 3, 5):
            await raw.until(lambda one, stream=stream: one.stream_id == stream and "END_STREAM" in one.flags)
            await raw.assert_open()
            assert max(raw.answers) == stream
            await raw.send(good(stream))
        await raw.next()

    double.scripts.append(script)
    async with asyncio.timeout(10):
        assert await call(channel) == b"fine"
        assert await asyncio.gather(call(channel), call(channel)) == [b"fine"] * 2


# Several calls at once


async def call_all(
    channel: Channel, *contents: bytes, deadline: float = 10, read_delay: float = 0.0
) -> list[bytes | tuple[str, str]]:
    """The values of the responses, or the code and text of the errors."""
    calls = [("/t.T/Echo", BytesValue(value=content), BytesValue) for content in contents]
    results = await channel.call_all(calls, deadline=deadline, read_delay=read_delay)
    return [(one.code, one.text) if isinstance(one, RpcError) else one.value for one in results]


@pytest.mark.parametrize("read_delay", [0.0, 0.02])
async def test_call_all_returns_responses_and_errors_in_the_order_of_the_calls(
    double: Double, channel: Channel, read_delay: float
) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        for stream in (1, 3, 5, 7):
            await raw.until(lambda one, stream=stream: one.stream_id == stream and "END_STREAM" in one.flags)
        denied = frame(HEADERS, END_HEADERS | END_STREAM, 1, fields((":status", "200"), ("grpc-status", "7")))
        await raw.send(good(5, b"third"), end(7, fields((":status", "200"))), denied)
        await raw.send(good(3, b"second"))
        await raw.next()

    double.scripts.append(script)
    results = await call_all(channel, b"a", b"b", b"c", b"d", read_delay=read_delay)
    assert results[1:3] == [b"second", b"third"]
    assert [result[0] for result in (results[0], results[3])] == ["PERMISSION_DENIED", "UNKNOWN"]


async def test_call_all_returns_the_other_responses_if_one_exceeds_the_deadline(
    double: Double, channel: Channel
) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: one.stream_id == 5 and "END_STREAM" in one.flags)
        await raw.send(good(5), good(1))
        while await raw.next() is not None:
            pass

    double.scripts.append(script)
    late = ("DEADLINE_EXCEEDED", "no response within 0.1 s")
    assert await call_all(channel, b"a", b"b", b"c", deadline=0.1) == [b"fine", late, b"fine"]
    await until(lambda: double.raws[0].answers[3].reset == 8)
    assert double.raws[0].answers[1].reset is None


async def test_call_all_waits_for_streams_that_the_server_accepts(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting((3, 1)))
        for stream in (1, 3, 5):
            await raw.until(lambda one, stream=stream: one.stream_id == stream and "END_STREAM" in one.flags)
            assert max(raw.answers) == stream
            await raw.send(good(stream))
        while await raw.next() is not None:
            pass

    double.scripts.append(script)
    async with asyncio.timeout(10):
        assert await call(channel) == b"fine"
        assert await call_all(channel, b"a", b"b", read_delay=0.01) == [b"fine"] * 2


async def test_call_all_sends_the_requests_in_one_write(
    double: Double, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.scripts.append(respond_with(good(1), good(3), good(5), good(7)))
    writes: list[int] = []
    write = asyncio.selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]

    def counted(transport: Any, data: bytes) -> None:
        if b"/t.T/Echo" in bytes(data):
            writes.append(bytes(data).count(b"/t.T/Echo"))
        write(transport, data)

    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write", counted)  # type: ignore[attr-defined]
    await call_all(channel, b"a", b"b", b"c", b"d", deadline=5)
    assert writes == [4]


async def test_call_all_fails_if_there_is_no_connection(directory: str) -> None:
    async with Channel(f"{directory}/missing") as channel:
        with pytest.raises(RpcError, match="UNAVAILABLE: No such file"):
            await call_all(channel, b"a", b"b")


async def test_close_fails_call_all_while_reading_is_delayed(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with())
    task = asyncio.create_task(call_all(channel, b"a", b"b", read_delay=0.05))
    await until(lambda: bool(double.raws) and double.raws[0].answers[3].ended)
    channel.close()
    assert await task == [CLOSED] * 2


# A closed channel


CLOSED = ("UNAVAILABLE", "the channel is closed")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_close_fails_calls_in_progress(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with())
    task = asyncio.create_task(failure(channel))
    await until(lambda: bool(double.raws) and bool(double.raws[0].seen))
    channel.close()
    assert await task == CLOSED


async def test_close_fails_a_call_that_waits_for_a_stream_slot(double: Double, channel: Channel) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting((3, 1)))
        while await raw.next() is not None:
            pass

    double.scripts.append(script)
    first = asyncio.create_task(failure(channel))
    await until(lambda: bool(double.raws) and any(isinstance(one, SettingsFrame) for one in double.raws[0].seen[1:]))
    second = asyncio.create_task(failure(channel))
    await asyncio.sleep(0)
    channel.close()
    assert await asyncio.gather(first, second) == [CLOSED, CLOSED]


async def test_calls_and_streams_after_close_fail_without_a_connection(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with(good()))
    assert await call(channel) == b"fine"
    channel.close()
    assert await failure(channel) == CLOSED
    with pytest.raises(RpcError, match="UNAVAILABLE: the channel is closed"):
        await anext(aiter(channel.stream("/t.T/Watch", BytesValue(), BytesValue)))
    assert len(double.raws) == 1


async def test_closed_channels_leave_no_descriptor_and_no_task(directory: str) -> None:
    async with serving(f"{directory}/s"):
        descriptors, tasks = open_descriptors(), asyncio.all_tasks()
        for _ in range(20):
            channel = Channel(f"{directory}/s")
            assert await call(channel, b"a") == b"a"
            channel.close()
            assert await failure(channel) == CLOSED
        await until(lambda: open_descriptors() == descriptors)
        assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("rounds", range(6))
async def test_close_while_connecting_leaves_no_descriptor(directory: str, rounds: int) -> None:
    async with serving(f"{directory}/s"):
        descriptors, tasks = open_descriptors(), asyncio.all_tasks()
        channel = Channel(f"{directory}/s")
        calls = [asyncio.create_task(call(channel)) for _ in range(3)]
        for _ in range(rounds):  # iterations of the event loop, each a step of the connect
            await asyncio.sleep(0)
        answered = sum(task.done() for task in calls)
        channel.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results[answered:]] == ["UNAVAILABLE: the channel is closed"] * (3 - answered)
        assert await failure(channel) == CLOSED
        await until(lambda: open_descriptors() == descriptors)
        assert asyncio.all_tasks() == tasks


async def test_exiting_the_context_while_connecting_waits_for_the_descriptor(directory: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{directory}/s")
        listening.listen()
        descriptors = open_descriptors()
        async with Channel(f"{directory}/s") as channel:
            task = asyncio.create_task(failure(channel))
            await asyncio.sleep(0)
            assert open_descriptors() > descriptors
        assert open_descriptors() == descriptors
        assert await task == CLOSED


async def test_close_ends_calls_on_a_draining_connection(double: Double, channel: Channel) -> None:
    async def leave(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: one.stream_id == 1 and "END_STREAM" in one.flags)
        await raw.send(frame(GOAWAY, 0, 0, number(1) + number(0)), frame(PING, 0, 0, b"12345678"))
        while await raw.next() is not None:
            pass

    double.scripts += [leave, respond_with(good())]
    first = asyncio.create_task(failure(channel))
    await until(lambda: bool(double.raws) and any(isinstance(one, PingFrame) for one in double.raws[0].seen))
    assert await call(channel) == b"fine"
    channel.close()
    assert await first == CLOSED


async def test_a_deadline_while_connecting_leaks_no_descriptor(directory: str) -> None:
    async with serving(f"{directory}/s"):
        descriptors, tasks = open_descriptors(), asyncio.all_tasks()
        async with Channel(f"{directory}/s") as channel:
            for deadline in (0, 0, 1e-9, 1e-6):
                with contextlib.suppress(RpcError):
                    await call(channel, deadline=deadline)
            assert await call(channel, b"a") == b"a"
        await until(lambda: open_descriptors() == descriptors)
        assert asyncio.all_tasks() == tasks


async def test_reconnecting_to_a_server_that_does_not_read_keeps_one_descriptor(
    double: Double, channel: Channel
) -> None:
    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: isinstance(one, HeadersFrame))
        raw.writer.transport.pause_reading()
        windows = setting((4, 2**31 - 1)) + frame(WINDOW_UPDATE, 0, 0, number(2**30))
        await raw.send(windows, frame(PING, 0, 1, b"12345678"))
        await finished.wait()

    finished = asyncio.Event()
    double.scripts.append(script)
    descriptors = open_descriptors()
    for _ in range(5):
        with pytest.raises(RpcError, match="UNAVAILABLE"):
            await call(channel, b"x" * 3_000_000)
    assert open_descriptors() - descriptors == 6  # the server's five, and the client's last one
    finished.set()


# Streams


async def test_flow_control_stops_a_server_that_sends_faster_than_is_read(double: Double, channel: Channel) -> None:
    one = message(b"x" * 900)

    async def script(raw: Raw) -> None:
        await raw.send(setting())
        await raw.until(lambda one: "END_STREAM" in one.flags)
        await raw.send(begin())
        window = 65535
        for _ in range(500):
            while window < len(one):
                found = await raw.until(lambda one: isinstance(one, WindowUpdateFrame) and one.stream_id == 1)
                window += found.window_increment
            window -= len(one)
            await raw.send(frame(DATA, 0, 1, one))
            raw.sent[1] = raw.sent.get(1, 0) + len(one)
        await raw.send(end())
        await raw.next()

    double.scripts.append(script)
    received = 0
    async for answer in channel.stream("/t.T/Flood", BytesValue(), BytesValue):
        received += len(answer.value)
        if received == 900:
            await until(lambda: double.raws[0].sent.get(1, 0) > 65535 - len(one))
            assert not any(isinstance(found, WindowUpdateFrame) and found.stream_id for found in double.raws[0].seen)
    assert received == 500 * 900


async def test_a_stream_that_exceeds_its_window_is_reset(double: Double, channel: Channel) -> None:
    double.scripts.append(respond_with(begin(), frame(DATA, 0, 1, message(b"x" * 900)) * 200))
    received = 0

    async def receive() -> None:
        nonlocal received
        async for _ in channel.stream("/t.T/Flood", BytesValue(), BytesValue):
            received += 1
            await until(lambda: any(isinstance(one, RstStreamFrame) for one in double.raws[0].seen))

    with pytest.raises(RpcError, match="FLOW_CONTROL_ERROR"):
        await receive()
    assert received < 100


async def test_closing_a_stream_cancels_its_handler(directory: str) -> None:
    async with serving(f"{directory}/s") as methods, Channel(f"{directory}/s") as channel:
        stream = channel.stream("/t.T/Watch", BytesValue(value=b"a"), BytesValue)
        assert (await anext(aiter(stream))).value == b"a"
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: methods.cancelled == 1)


async def test_client_and_server_interoperate(directory: str) -> None:
    async with serving(f"{directory}/s") as methods, Channel(f"{directory}/s") as channel:
        big = BytesValue(value=b"x" * 3_000_000)
        assert await channel.call("/t.T/Echo", big, BytesValue, deadline=10) == big
        counted = [one.value async for one in channel.stream("/t.T/Count", BytesValue(value=b"1000"), BytesValue)]
        assert counted == [str(count).encode() for count in range(1000)]
        with pytest.raises(RpcError, match="NOT_FOUND: 50 % «of» this\n"):
            await channel.call("/t.T/Refuse", BytesValue(value="50 % «of» this\n".encode()), BytesValue, deadline=10)
        calls = [channel.call("/t.T/Wait", BytesValue(value=b"a"), BytesValue, deadline=10) for _ in range(150)]
        waiting = asyncio.gather(*calls)
        await until(lambda: methods.running == 100)
        methods.release.set()
        assert len(await waiting) == 150


async def test_calls_to_a_server_that_reads_nothing_do_not_grow_the_write_buffer(
    double: Double, channel: Channel
) -> None:
    async def script(raw: Raw) -> None:
        raw.writer.transport.pause_reading()
        await raw.send(setting((4, 2**31 - 1)), frame(WINDOW_UPDATE, 0, 0, number(2**30)))
        await resumed.wait()
        raw.writer.transport.resume_reading()
        while (found := await raw.next()) is not None:
            if "END_STREAM" in found.flags and not raw.answers[found.stream_id].reset:
                await raw.send(good(found.stream_id))

    resumed = asyncio.Event()
    double.scripts.append(script)
    with pytest.raises(RpcError, match="DEADLINE_EXCEEDED"):
        await call(channel, b"x" * 3_000_000, deadline=0.2)
    calls = [failure(channel, deadline=0.05) for _ in range(20)]
    assert {code for code, _ in await asyncio.gather(*calls)} == {"DEADLINE_EXCEEDED"}
    resumed.set()
    assert await call(channel) == b"fine"
    assert sorted(stream for stream in double.raws[0].answers if stream) == [1, 3]
