"""The rules of HTTP/2 and gRPC, one by one, on the server: frames that end a stream, a connection, or neither."""

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import AsyncIterator

import pytest
from hpack import Encoder
from http2 import (
    ACK,
    CALL,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    OPEN,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Methods,
    Raw,
    block,
    call,
    frame,
    message,
    number,
    serving,
    setting,
)
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame
from waiting import until
from wire import Wire

from accelplane.rpc.server import ConnectionTracker, RpcServer, ServerConnection


@pytest.fixture
def path(directory: str) -> str:
    return f"{directory}/s"


@pytest.fixture
async def methods(path: str) -> AsyncIterator[Methods]:
    async with serving(path) as methods:
        yield methods


@pytest.fixture
async def raw(methods: Methods, path: str) -> AsyncIterator[Raw]:
    async with Raw.to(path) as raw:
        yield raw


# Connection errors


@pytest.mark.parametrize(
    ("data", "code"),
    {
        "data without a stream": (frame(DATA, 0, 0, b"abc"), PROTOCOL_ERROR),
        "data before headers": (frame(DATA, 0, 1, b"abc"), PROTOCOL_ERROR),
        "data in a stream of the server": (OPEN + frame(DATA, 0, 2, b"abc"), PROTOCOL_ERROR),
        "data with more padding than data": (OPEN + frame(DATA, PADDED, 1, b"\x05abc"), PROTOCOL_ERROR),
        "data padded without length": (OPEN + frame(DATA, PADDED, 1), FRAME_SIZE_ERROR),
        "headers without a stream": (frame(HEADERS, END_HEADERS, 0, block()), PROTOCOL_ERROR),
        "headers with an even number": (frame(HEADERS, END_HEADERS, 2, block()), PROTOCOL_ERROR),
        "headers with an older number": (call(3) + call(1), STREAM_CLOSED),
        "headers with more padding": (frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block()), PROTOCOL_ERROR),
        "headers with half a priority": (frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"abc"), FRAME_SIZE_ERROR),
        "headers that are none": (frame(HEADERS, END_HEADERS, 1, b"\xff" * 20), COMPRESSION_ERROR),
        "headers of an index that is none": (frame(HEADERS, END_HEADERS, 1, b"\xbe"), COMPRESSION_ERROR),
        "a table larger than allowed": (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f" + block()), COMPRESSION_ERROR),
        "headers that swell": (frame(HEADERS, END_HEADERS, 1, block(x="y" * 100) + b"\xbe" * 500), COMPRESSION_ERROR),
        "data within headers": (frame(HEADERS, 0, 1, block()) + frame(DATA, 0, 1, b""), PROTOCOL_ERROR),
        "another's headers within headers": (
            frame(HEADERS, 0, 1, block()) + frame(CONTINUATION, END_HEADERS, 3), PROTOCOL_ERROR,
        ),
        "headers that go on from nothing": (frame(CONTINUATION, END_HEADERS, 1, block()), PROTOCOL_ERROR),
        "headers without end": (
            frame(HEADERS, 0, 1, b"\0\1x\x7f\xff\xff\x03") + frame(CONTINUATION, 0, 1, b"x" * 16000) * 2,
            ENHANCE_YOUR_CALM,
        ),
        "headers in crumbs": (frame(HEADERS, 0, 1, block()) + frame(CONTINUATION, 0, 1) * 17, ENHANCE_YOUR_CALM),
        "a priority without a stream": (frame(PRIORITY, 0, 0, b"12345"), PROTOCOL_ERROR),
        "a priority of another size": (frame(PRIORITY, 0, 1, b"1234"), FRAME_SIZE_ERROR),
        "a reset of nothing": (frame(RST_STREAM, 0, 1, number(CANCEL)), PROTOCOL_ERROR),
        "a reset of the connection": (frame(RST_STREAM, 0, 0, number(CANCEL)), PROTOCOL_ERROR),
        "a reset of another size": (OPEN + frame(RST_STREAM, 0, 1, b"123"), FRAME_SIZE_ERROR),
        "settings of a stream": (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
        "settings of another size": (frame(SETTINGS, 0, 0, b"12345"), FRAME_SIZE_ERROR),
        "settings acknowledged with some": (frame(SETTINGS, ACK, 0, b"123456"), FRAME_SIZE_ERROR),
        "settings: push twice": (setting((2, 2)), PROTOCOL_ERROR),
        "settings: too wide a window": (setting((4, 2**31)), FLOW_CONTROL_ERROR),
        "settings: too small frames": (setting((5, 16383)), PROTOCOL_ERROR),
        "settings: too large frames": (setting((5, 2**24)), PROTOCOL_ERROR),
        "settings: a stream's window overflows": (
            OPEN + frame(WINDOW_UPDATE, 0, 1, number(2**31 - 65536)) + setting((4, 65536)), FLOW_CONTROL_ERROR,
        ),
        "a push": (OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + block()), PROTOCOL_ERROR),
        "a ping of a stream": (frame(PING, 0, 1, b"12345678"), PROTOCOL_ERROR),
        "a ping of another size": (frame(PING, 0, 0, b"1234567"), FRAME_SIZE_ERROR),
        "a goodbye of a stream": (frame(GOAWAY, 0, 1, number(0) * 2), PROTOCOL_ERROR),
        "a goodbye of another size": (frame(GOAWAY, 0, 0, number(0)), FRAME_SIZE_ERROR),
        "a window enlarged by nothing": (frame(WINDOW_UPDATE, 0, 0, number(0)), PROTOCOL_ERROR),
        "a window too wide": (frame(WINDOW_UPDATE, 0, 0, number(2**31 - 1)), FLOW_CONTROL_ERROR),
        "a window of another size": (frame(WINDOW_UPDATE, 0, 0, b"12345"), FRAME_SIZE_ERROR),
        "a window of nothing": (frame(WINDOW_UPDATE, 0, 1, number(1)), PROTOCOL_ERROR),
        "a frame too long": (struct.pack(">IBI", 16385 << 8 | DATA, 0, 1), FRAME_SIZE_ERROR),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)  # fmt: skip
async def test_a_connection_error_is_sent_in_goaway(raw: Raw, data: str, code: tuple[bytes, int]) -> None:
    sent, expected = code
    await raw.send(sent)
    assert await raw.goaway_code() == expected


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n", PREFACE[:10] + b"?" * 20, PREFACE + frame(PING, 0, 0, b"12345678"),
        PREFACE + frame(SETTINGS, ACK), PREFACE + call(),
    ],
    ids=["HTTP/1", "half a preface", "ping", "acknowledgement", "call"],
)  # fmt: skip
async def test_a_connection_without_preface_and_settings_is_closed(methods: Methods, path: str, first: bytes) -> None:
    async with Raw.to(path, first) as raw:
        assert await raw.goaway_code() == PROTOCOL_ERROR


# Stream errors


@pytest.mark.parametrize(
    ("data", "code"),
    {
        "an upper-case name": (frame(HEADERS, END_HEADERS, 1, block(Upper="x")), PROTOCOL_ERROR),
        "a header of connections": (frame(HEADERS, END_HEADERS, 1, block(connection="close")), PROTOCOL_ERROR),
        "an unknown pseudo-header": (frame(HEADERS, END_HEADERS, 1, Encoder().encode([(":odd", "1")])), PROTOCOL_ERROR),
        "a pseudo-header twice": (frame(HEADERS, END_HEADERS, 1, b"\x83" + block()), PROTOCOL_ERROR),
        "a late pseudo-header": (
            frame(HEADERS, END_HEADERS, 1, Encoder().encode([("te", "trailers"), *CALL])), PROTOCOL_ERROR,
        ),
        "a line break": (frame(HEADERS, END_HEADERS, 1, block(x="a\r\nb")), PROTOCOL_ERROR),
        "no method": (frame(HEADERS, END_HEADERS, 1, block(method=None)), PROTOCOL_ERROR),
        "no path": (frame(HEADERS, END_HEADERS, 1, block(path=None)), PROTOCOL_ERROR),
        "an answer": (frame(HEADERS, END_HEADERS, 1, b"\x88" + block()), PROTOCOL_ERROR),
        "data after the end": (call(path="/t.T/Wait") + frame(DATA, 0, 1, b"abc"), STREAM_CLOSED),
        "headers after the end": (
            call(path="/t.T/Wait") + frame(HEADERS, END_HEADERS | END_STREAM, 1, block(path=None)), STREAM_CLOSED,
        ),
        "headers between data": (OPEN + frame(HEADERS, END_HEADERS, 1, b""), PROTOCOL_ERROR),
        "a window enlarged by nothing": (OPEN + frame(WINDOW_UPDATE, 0, 1, number(0)), PROTOCOL_ERROR),
        "a window too wide": (OPEN + frame(WINDOW_UPDATE, 0, 1, number(2**31 - 1)), FLOW_CONTROL_ERROR),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)  # fmt: skip
async def test_a_stream_error_resets_only_its_stream(
    methods: Methods, raw: Raw, data: str, code: tuple[bytes, int]
) -> None:
    sent, expected = code
    await raw.send(sent)
    answer = await raw.answer()
    assert (answer.reset, answer.headers) == (expected, {})
    await raw.send(call(3, b"next"))
    assert (await raw.answer(3)).data == message(b"next")
    assert methods.running == 0


# Valid frames


@pytest.mark.parametrize(
    "data",
    {
        "in one": call(1, b"abc"),
        "the message in pieces": OPEN
        + b"".join(frame(DATA, 0, 1, message(b"abc")[at : at + 1]) for at in range(len(message(b"abc"))))
        + frame(DATA, END_STREAM, 1),
        "headers in pieces": frame(HEADERS, 0, 1, block()[:5])
        + frame(CONTINUATION, 0, 1, block()[5:9])
        + frame(CONTINUATION, END_HEADERS, 1, block()[9:])
        + frame(DATA, END_STREAM, 1, message(b"abc")),
        "padding and priority": frame(
            HEADERS, END_HEADERS | PADDED | WITH_PRIORITY, 1, b"\x03" + number(0) + b"\x10" + block() + b"\0\0\0"
        )
        + frame(DATA, END_STREAM | PADDED, 1, b"\x02" + message(b"abc") + b"\0\0"),
        "trailers": OPEN
        + frame(DATA, 0, 1, message(b"abc"))
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, Encoder().encode([("x", "y")])),
        "metadata": call(1, b"abc", user_agent="me", x_bin="AAAA", grpc_timeout="10S"),
        "another kind of protobuf": call(1, b"abc", content_type="application/grpc+proto"),
        "frames of other types": frame(0xEE, 0xFF, 0, b"?") + frame(0xEF, 0xFF, 1, b"?") + call(1, b"abc"),
        "settings": setting((1, 0), (2, 0), (3, 0), (5, 2**24 - 1), (6, 1), (0xFFFF, 7)) + call(1, b"abc"),
        "acknowledgements": frame(SETTINGS, ACK) + frame(PING, ACK, 0, b"12345678") + call(1, b"abc"),
        "priorities": frame(PRIORITY, 0, 7, number(0) + b"\x01") + call(1, b"abc"),
        "reserved bits": frame(HEADERS, END_HEADERS, 1 | 1 << 31, block())
        + frame(DATA, END_STREAM, 1 | 1 << 31, message(b"abc")),
    }.values(),
)
@pytest.mark.parametrize("step", [1, 7, 100_000], ids=["byte by byte", "seven by seven", "at once"])
async def test_a_call_is_answered_for_any_segmentation(raw: Raw, data: bytes, step: int) -> None:
    for at in range(0, len(data), step):
        await raw.send(data[at : at + step])
        await asyncio.sleep(0)
    answer = await raw.answer()
    assert answer.headers == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
    assert answer.data == message(b"abc")
    await raw.assert_open()


async def test_a_unary_response_is_one_write() -> None:
    methods = Methods()
    connection = ServerConnection(
        {path.encode(): method for path, method in methods.table.items()}, ConnectionTracker()
    )
    wire = Wire(connection, reads=True)
    await wire.feed([PREFACE + setting()])
    before = wire.writes
    await wire.feed([call(1, b"abc")])
    await until(lambda: not connection.streams)
    assert wire.writes == before + 1
    assert [type(one) for one in wire.frames()[-3:]] == [HeadersFrame, DataFrame, HeadersFrame]


async def test_response_headers_use_no_dynamic_table(methods: Methods, path: str) -> None:
    async with Raw.to(path, PREFACE, setting((1, 0))) as raw:
        raw.decoder.max_allowed_table_size = 0
        await raw.send(call(), call(3, path="/t.T/Refuse"), call(5, path="/t.T/Nothing"))
        assert (await raw.answer(1)).status == "0"
        assert (await raw.answer(3)).status == "5"
        assert (await raw.answer(5)).status == "12"


async def test_repeated_indexed_headers_follow_table_changes(raw: Raw) -> None:
    encoder = Encoder()
    first = encoder.encode(CALL)
    later = encoder.encode(CALL)
    assert min(later) >= 0x80
    for turn, fields in enumerate((first, later, later, encoder.encode((("x", "new"), *CALL[:0])), later)):
        stream = 2 * turn + 1
        await raw.send(frame(HEADERS, END_HEADERS, stream, fields), frame(DATA, END_STREAM, stream, message(b"a")))
    # The fourth is no request; by the fifth the old indices mean other headers.
    answers = [await raw.answer(stream) for stream in (1, 3, 5, 7, 9)]
    assert [answer.status for answer in answers] == ["0", "0", "0", None, None]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"method": "GET"}, "405", "12"), ({"content-type": None}, "415", "2"),
        ({"content_type": "text/html"}, "415", "2"), ({"te": None}, "400", "13"), ({"te": "gzip"}, "400", "13"),
        ({"path": "/t.T/Nothing"}, "200", "12"), ({"path": "nowhere"}, "200", "12"),
        ({"grpc_timeout": "soon"}, "400", "13"), ({"grpc_timeout": "123456789S"}, "400", "13"),
        ({"grpc_timeout": "-1S"}, "400", "13"),
    ],
)  # fmt: skip
async def test_invalid_call_headers_are_rejected_with_a_message(
    raw: Raw, changes: dict[str, str | None], status: str, code: str
) -> None:
    fields = {name.replace("-", "_"): value for name, value in changes.items()}
    await raw.send(call(1, b"abc", **fields), call(3, b"next"))
    answer = await raw.answer()
    assert (answer.headers[":status"], answer.status, answer.data) == (status, code, b"")
    assert answer.headers["grpc-message"]
    assert (await raw.answer(3)).data == message(b"next")


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (frame(DATA, END_STREAM, 1), "3", "no message in the request"),
        (frame(DATA, END_STREAM, 1, message(b"abc")[:-1]), "13", "the stream ended within a message"),
        (frame(DATA, END_STREAM, 1, message() * 2), "13", "more than one message in the request"),
        (frame(DATA, 0, 1, message(compressed=1)), "12", "compressed messages are not supported"),
        (frame(DATA, 0, 1, b"\0\0\x40\0\1"), "8", "message of 4194305 bytes, expected at most 4194304"),
        (
            frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, 1) + b"\xff"),
            "3",
            "cannot decode the request, expected BytesValue",
        ),
    ],
)
async def test_invalid_messages_are_rejected_with_a_message(raw: Raw, data: bytes, code: str, text: str) -> None:
    await raw.send(OPEN, data)
    answer = await raw.answer()
    assert (answer.status, answer.headers["grpc-message"]) == (code, text)
    await raw.assert_open()


async def test_a_response_before_the_end_of_the_request_resets_the_stream(raw: Raw) -> None:
    await raw.send(OPEN, frame(DATA, 0, 1, message(compressed=1)))
    await raw.answer()
    reset = await raw.until(lambda one: one.stream_id == 1)
    assert (reset.type, reset.error_code) == (RST_STREAM, NO_ERROR)
    await raw.send(frame(DATA, 0, 1, b"x" * 1000), frame(DATA, END_STREAM, 1, b"x"))
    await raw.assert_open()


# Errors and deadlines


async def test_a_status_message_is_percent_encoded(raw: Raw) -> None:
    await raw.send(call(1, "50 % of «this»\n".encode(), path="/t.T/Refuse"))
    answer = await raw.answer()
    assert answer.status == "5"
    assert answer.headers["grpc-message"] == "50 %25 of %C2%ABthis%C2%BB%0A"


async def test_a_handlers_exception_is_logged_and_not_sent(raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        await raw.send(call(path="/t.T/Fail"))
        answer = await raw.answer()
    assert (answer.status, answer.headers["grpc-message"]) == ("2", "Internal Server Error")
    assert "a secret" in caplog.text


async def test_an_exceeded_deadline_cancels_the_handler(methods: Methods, raw: Raw) -> None:
    await raw.send(call(path="/t.T/Wait", grpc_timeout="20m"))
    assert (await raw.answer()).status == "4"
    await until(lambda: methods.cancelled == 1)
    await raw.assert_open()


async def test_handlers_may_use_timeouts_of_their_own(raw: Raw) -> None:
    await raw.send(call(path="/t.T/Timeout", grpc_timeout="10S"))
    assert (await raw.answer()).data == message(b"in a task")


async def test_a_reset_or_a_lost_connection_cancels_handlers(methods: Methods, path: str) -> None:
    async with Raw.to(path) as raw:
        await raw.send(call(path="/t.T/Wait"), call(3, path="/t.T/Watch"), call(5, path="/t.T/Wait"))
        await until(lambda: methods.running == 3)
        await raw.send(frame(RST_STREAM, 0, 1, number(CANCEL)))
        await until(lambda: methods.cancelled == 1)
    await until(lambda: methods.cancelled == 3)


async def test_a_call_reset_before_its_handler_starts_is_not_handled(methods: Methods, raw: Raw) -> None:
    await raw.send(call(path="/t.T/Wait"), frame(RST_STREAM, 0, 1, number(CANCEL)))
    await raw.assert_open()
    assert (methods.running, methods.cancelled) == (0, 0)


# Shutdown


async def test_a_stopping_server_sends_goaway_and_finishes_unary_calls(methods: Methods, path: str) -> None:
    async with Raw.to(path) as raw:
        await raw.send(call(path="/t.T/Wait"), call(3, path="/t.T/Watch"), frame(HEADERS, END_HEADERS, 5, block()))
        await until(lambda: methods.running == 2)
        stopping = asyncio.create_task(methods.server.stop())
        goaway = await raw.until(lambda one: isinstance(one, GoAwayFrame))
        assert (goaway.error_code, goaway.last_stream_id) == (NO_ERROR, 5)
        await raw.send(call(7))
        ended = {stream: await raw.answer(stream) for stream in (3, 5, 7)}
        assert ended[3].status == ended[5].status == "14"
        assert ended[7].reset == REFUSED_STREAM
        methods.release.set()
        assert (await raw.answer(1)).status == "0"
        assert await raw.next() is None
        await stopping


async def test_stop_cancels_a_call_that_does_not_end(methods: Methods, path: str) -> None:
    async with Raw.to(path) as raw:
        await raw.send(call(path="/t.T/Wait"))
        await until(lambda: methods.running == 1)
        await methods.server.stop()
        assert (methods.running, methods.cancelled) == (0, 1)
        assert await raw.goaway_code() == NO_ERROR


async def test_stop_finishes_a_message_before_it_ends_the_stream(methods: Methods, path: str) -> None:
    async with Raw.to(path, PREFACE, setting((4, 10))) as raw:
        await raw.send(call(1, b"x" * 100, path="/t.T/Watch"))
        assert await raw.received_bytes(1, 10) == 10
        stopping = asyncio.create_task(methods.server.stop())
        await raw.until(lambda one: isinstance(one, GoAwayFrame))
        await raw.send(frame(WINDOW_UPDATE, 0, 1, number(1000)))
        answer = await raw.answer()
        assert (answer.data, answer.status) == (message(b"x" * 100), "14")
        await stopping


async def test_calls_are_answered_after_the_clients_goaway(methods: Methods, raw: Raw) -> None:
    await raw.send(call(1, b"abc"), frame(GOAWAY, 0, 0, number(0) * 2))
    assert (await raw.answer()).data == message(b"abc")


@pytest.mark.parametrize("rounds", range(8))
async def test_a_connection_accepted_while_the_server_stops_is_closed(path: str, rounds: int) -> None:
    async with serving(path) as methods:
        descriptors = len(os.listdir("/proc/self/fd"))
        connecting = asyncio.create_task(asyncio.open_unix_connection(path))
        for _ in range(rounds):  # iterations of the event loop, each a step of the accept
            await asyncio.sleep(0)
        await methods.server.stop()
        with contextlib.suppress(ConnectionError):  # refused, or reset
            reader, writer = await connecting
            writer.close()
            async with asyncio.timeout(10):
                await reader.read()
                await writer.wait_closed()
        await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors - 1)  # the listening socket


async def test_a_server_whose_start_is_cancelled_does_not_listen_after_its_stop(path: str) -> None:
    server = RpcServer({})
    starting = asyncio.create_task(server.start(path))
    await asyncio.sleep(0)  # it listens, and waits for the next iteration of the event loop
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(path)
