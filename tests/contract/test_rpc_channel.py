"""The client with servers that violate HTTP/2 and gRPC, or disconnect, and the errors of calls."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
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
from hyperframe.frame import GoAwayFrame, HeadersFrame, RstStreamFrame, WindowUpdateFrame
from rpcchannels import BEGIN, Double, begin, call, end, failure, fields, good, respond_with, running_double
from waiting import until

from accelplane.rpc import Channel, RpcError


@pytest.fixture
async def double(directory: str) -> AsyncIterator[Double]:
    async with running_double(directory) as double:
        yield double


@pytest.fixture
async def channel(double: Double) -> AsyncIterator[Channel]:
    async with Channel(double.path, max_message=1000) as channel:
        yield channel


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
