"""Both ends of our gRPC with any bytes: no exception, bounded buffers, and GOAWAY before the connection ends.

The connections use a transport in memory, which records writes and pauses of reading.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder
from http2 import (
    CALL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Methods,
    frame,
    message,
    number,
    setting,
)
from hypothesis import given
from hypothesis import strategies as st
from waiting import until
from wire import Wire

from accelplane.rpc.channel import ClientConnection
from accelplane.rpc.errors import RpcError
from accelplane.rpc.server import ConnectionTracker, ServerConnection

# Bytes


def encoded(pairs: Sequence[tuple[str, str]], huffman: bool) -> bytes:
    return Encoder().encode(pairs, huffman=huffman)


PATHS = st.sampled_from([f"/t.T/{name}" for name in ("Echo", "Wait", "Fail", "Refuse", "Count", "Watch", "Flood", "?")])
STREAMS = st.one_of(st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 20))
VALUES = st.one_of(st.sampled_from([0, 1, 10, 16383, 16384, 65535, 65536, 2**24, 2**31 - 1, 2**31]), st.integers(0, 99))
FLAGS = st.one_of(
    st.integers(0, 255), st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, WITH_PRIORITY])
)
FIELDS = st.lists(
    st.one_of(
        st.sampled_from([*CALL, (":status", "200"), ("grpc-status", "0"), ("grpc-timeout", "1m"), ("Upper", "x")]),
        st.tuples(st.text(max_size=5), st.text(max_size=20)),
    ),
    max_size=8,
)
BLOCKS = st.builds(encoded, FIELDS, st.booleans())
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.builds(message, st.binary(max_size=50), compressed=st.sampled_from([0, 0, 1])),
    st.builds(lambda length: struct.pack(">BI", 0, length), st.integers(0, 2**32 - 1)),
    st.lists(st.tuples(st.integers(0, 8), VALUES), max_size=4).map(
        lambda pairs: b"".join(struct.pack(">HI", *pair) for pair in pairs)
    ),
    VALUES.map(number),
    BLOCKS,
    st.sampled_from([b"", b"12345678", encoded(CALL, False)]),
)
FRAMES = st.builds(frame, st.integers(0, 12), FLAGS, STREAMS, PAYLOADS)


@st.composite
def sessions(draw: st.DrawFn) -> bytes:
    """Frames of a valid client, with the encoder's state."""
    encoder, stream, frames_sent = Encoder(), -1, [setting((4, draw(VALUES)))]
    for act in draw(st.lists(st.sampled_from("ccccoodersswwp+"), max_size=40)):
        if act in "co":
            stream += 2
            extra = [("x-more", draw(st.text("abc", max_size=30)))] if draw(st.booleans()) else []
            pairs = [(name, draw(PATHS) if name == ":path" else value) for name, value in CALL]
            fields = encoder.encode(pairs + extra, huffman=draw(st.booleans()))
            cut = draw(st.integers(0, len(fields)))
            frames_sent.append(frame(HEADERS, 0, stream, fields[:cut]))
            frames_sent.append(frame(CONTINUATION, END_HEADERS, stream, fields[cut:]))
        if act == "c":
            frames_sent.append(frame(DATA, END_STREAM, stream, message(b"7" * draw(st.integers(0, 3)))))
        older = draw(st.integers(0, max(0, stream // 2))) * 2 + 1
        frames_sent.append(
            {
                "d": frame(DATA, 0, older, draw(st.binary(max_size=20))),
                "e": frame(DATA, END_STREAM, older),
                "r": frame(RST_STREAM, 0, older, number(8)),
                "s": setting((4, draw(VALUES)), (1, draw(VALUES))),
                "w": frame(WINDOW_UPDATE, 0, draw(st.sampled_from([0, older])), number(draw(VALUES))),
                "p": frame(PING, 0, 0, b"12345678"),
                "+": frame(PRIORITY, 0, older, b"12345"),
            }.get(act, b"")
        )
    return b"".join(frames_sent)


@st.composite
def changed(draw: st.DrawFn, sources: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with some of them changed, omitted or repeated."""
    data = draw(sources)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 12)))
        put = draw(st.one_of(st.binary(max_size=4), st.just(data[at:until] * 2)))
        data = data[:at] + put + data[until:]
    return data


@st.composite
def cut(draw: st.DrawFn, sources: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes in segments."""
    data = draw(sources)
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


ANYTHING = st.one_of(
    st.lists(FRAMES, max_size=30).map(b"".join), sessions(), changed(sessions()), st.binary(max_size=300)
)


@pytest.fixture
async def unhandled_errors() -> AsyncIterator[list[dict[str, Any]]]:
    """The unhandled errors of the event loop."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context))
    yield found
    assert found == []


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "reads nothing"])
@given(chunks=cut(ANYTHING), greeting=st.sampled_from([PREFACE + setting()] * 5 + [PREFACE, b""]))
async def test_a_server_survives_any_client(
    unhandled_errors: list[Any], chunks: list[bytes], greeting: bytes, *, reads: bool
) -> None:
    methods, tracker = Methods(), ConnectionTracker()
    connection = ServerConnection({path.encode(): method for path, method in methods.table.items()}, tracker)
    wire = Wire(connection, reads=reads)
    await wire.feed([greeting, *chunks])
    for _ in range(5):
        await asyncio.sleep(0)
    wire.check()
    connection.connection_lost(None)
    await until(lambda: methods.running == 0)
    await tracker.wait_closed(5)
    assert connection.streams == {}
    assert unhandled_errors == []


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """Frames of a valid server for three calls."""
    encoder, frames_sent = Encoder(), [setting((4, draw(VALUES)))]
    begin = [(":status", "200"), ("content-type", "application/grpc")]
    for stream in draw(st.permutations([1, 3, 5])):
        between = [b"", frame(PING, 0, 0, b"12345678"), frame(RST_STREAM, 0, stream, number(8))]
        status = [("grpc-status", draw(st.sampled_from("0259")))]
        frames_sent.append(frame(HEADERS, END_HEADERS, stream, encoder.encode(begin, huffman=draw(st.booleans()))))
        sizes = draw(st.lists(st.integers(0, 20), max_size=3))
        frames_sent += [frame(DATA, 0, stream, message(b"x" * size)) for size in sizes]
        frames_sent.append(draw(st.sampled_from(between)))
        frames_sent.append(frame(HEADERS, END_HEADERS | END_STREAM, stream, encoder.encode(status)))
        frames_sent.append(draw(st.sampled_from([b"", b"", frame(GOAWAY, 0, 0, number(stream) + number(0))])))
    return b"".join(frames_sent)


@given(
    chunks=cut(st.one_of(st.lists(FRAMES, max_size=30).map(b"".join), changed(replies()), st.binary(max_size=300))),
    greeting=st.sampled_from([setting()] * 5 + [b"", frame(SETTINGS, 0, 0, b"?")]),
)
async def test_a_client_survives_any_server(unhandled_errors: list[Any], chunks: list[bytes], greeting: bytes) -> None:
    connection = ClientConnection()
    wire = Wire(connection, reads=True)

    async def consume(size: int) -> str:
        answer = connection.open_call("/t.T/Echo", message(b"x" * size), 10.0, 1000)
        try:
            while (data := await answer.receive()) is not None:
                BytesValue.FromString(data)
        except RpcError as error:
            return error.code
        finally:
            answer.cancel()
        return "OK"

    tasks = [asyncio.create_task(consume(size)) for size in (0, 100, 100_000)]
    await asyncio.sleep(0)
    wire.written = wire.written.removeprefix(PREFACE)
    await wire.feed([greeting, *chunks])
    if not connection.draining:
        wire.check()
    connection.connection_lost(None)
    done, _pending = await asyncio.wait(tasks, timeout=5)
    assert len(done) == 3
    for task in done:
        assert task.exception() is None or "Error parsing message" in str(task.exception())
    assert connection.streams == {}
    assert unhandled_errors == []
