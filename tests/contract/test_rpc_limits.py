"""Flow control and limits of the gRPC server."""

import struct
from collections.abc import AsyncIterator

import pytest
from http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    OPEN,
    PING,
    PRIORITY,
    REFUSED_STREAM,
    RST_STREAM,
    WINDOW_UPDATE,
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
from hyperframe.frame import DataFrame, WindowUpdateFrame
from waiting import until


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


# Windows


async def test_a_response_waits_for_the_streams_window(raw: Raw) -> None:
    await raw.send(setting((4, 10)), call(1, b"100", path="/t.T/Big"), call(3, b"100", path="/t.T/Big"))
    expected = message(b"x" * 100)
    await raw.received_bytes(1, 10)
    await raw.received_bytes(3, 10)
    await raw.assert_open()
    await raw.send(frame(WINDOW_UPDATE, 0, 3, number(5)))
    assert await raw.received_bytes(3, 15) == 15
    await raw.send(setting((4, 40)))
    assert await raw.received_bytes(1, 40) == 40
    assert await raw.received_bytes(3, 45) == 45
    await raw.send(setting((4, 0)), frame(WINDOW_UPDATE, 0, 1, number(40)))
    await raw.assert_open()
    assert await raw.received_bytes(1, 40) == 40, "the window was reduced and increased again"
    await raw.send(frame(WINDOW_UPDATE, 0, 1, number(len(expected) - 40)))
    answer = await raw.answer()
    assert (answer.status, answer.data) == ("0", expected)


async def test_responses_share_the_connections_window_in_turn(raw: Raw) -> None:
    await raw.send(setting((4, 2**31 - 1)))
    for stream in (1, 3):
        await raw.send(call(stream, b"100000", path="/t.T/Big"))
    one, three = raw.answers[1], raw.answers[3]
    while len(one.data) + len(three.data) < 65535:
        found = await raw.next()
        assert not isinstance(found, DataFrame) or len(found.data) <= 16384
    await raw.assert_open()
    before = len(one.data), len(three.data)
    assert sum(before) == 65535
    await raw.send(frame(WINDOW_UPDATE, 0, 0, number(40_000)))
    await raw.assert_open()
    more = len(one.data) - before[0], len(three.data) - before[1]
    assert (sum(more), min(more)) == (40_000, 16384)
    await raw.send(frame(WINDOW_UPDATE, 0, 0, number(2**30)))
    assert {(await raw.answer(stream)).status for stream in (1, 3)} == {"0"}


async def test_a_stream_sends_its_next_message_after_the_last_is_sent(methods: Methods, raw: Raw) -> None:
    await raw.send(call(path="/t.T/Flood"))
    assert await raw.received_bytes(1, 65535) == 65535
    await raw.assert_open()
    assert methods.sent == 60_000
    await raw.send(frame(WINDOW_UPDATE, 0, 0, number(20_000)), frame(WINDOW_UPDATE, 0, 1, number(20_000)))
    await until(lambda: methods.sent == 80_000)
    await raw.send(frame(RST_STREAM, 0, 1, number(CANCEL)))
    await until(lambda: methods.cancelled == 1)


async def test_a_long_request_is_acknowledged_by_window_updates(raw: Raw) -> None:
    whole = message(b"y" * 1_000_000)
    await raw.send(setting((4, 2**31 - 1)), frame(WINDOW_UPDATE, 0, 0, number(2**30)), OPEN)
    await upload(raw, 1, whole, end=True)
    assert (await raw.answer()).data == whole


# Limits


async def test_at_most_a_hundred_calls_run_concurrently(methods: Methods, raw: Raw) -> None:
    await raw.send(*(call(2 * turn + 1, path="/t.T/Wait") for turn in range(101)))
    assert (await raw.answer(201)).reset == REFUSED_STREAM
    methods.release.set()
    assert (await raw.answer(1)).status == "0"
    await raw.send(call(203))
    assert (await raw.answer(203)).status == "0"


@pytest.mark.parametrize(
    "nuisance",
    [
        frame(PING, 0, 0, b"12345678"), setting(), frame(PRIORITY, 0, 1, b"12345"), frame(0xEE),
        frame(WINDOW_UPDATE, 0, 0, number(1)),
    ],
    ids=["ping", "settings", "priority", "unknown", "window"],
)  # fmt: skip
async def test_a_flood_of_frames_without_data_ends_the_connection(raw: Raw, nuisance: bytes) -> None:
    await raw.send(nuisance * 900)
    await raw.assert_open()
    await raw.send(nuisance * 5000)
    assert await raw.goaway_code() == ENHANCE_YOUR_CALM


async def test_a_flood_of_empty_data_ends_the_connection(raw: Raw) -> None:
    await raw.send(OPEN, frame(DATA, 0, 1) * 5000)
    assert await raw.goaway_code() == ENHANCE_YOUR_CALM


@pytest.mark.untraced
async def test_a_flood_of_reset_calls_ends_the_connection(methods: Methods, raw: Raw) -> None:
    for turn in range(5000):
        stream = 2 * turn + 1
        await raw.send(call(stream, path="/t.T/Wait"), frame(RST_STREAM, 0, stream, number(CANCEL)))
        if raw.reader.at_eof():
            break
    assert await raw.goaway_code() in (ENHANCE_YOUR_CALM, None)  # None: it came to an end while more was written
    await until(lambda: methods.running == 0)


async def test_a_ping_with_each_call_is_accepted(raw: Raw) -> None:
    ping, window = frame(PING, 0, 0, b"12345678"), frame(WINDOW_UPDATE, 0, 0, number(100))
    for turn in range(2000):
        await raw.send(call(2 * turn + 1), ping, window)
        await raw.answer(2 * turn + 1)
    await raw.assert_open()


async def test_the_memory_of_unfinished_requests_is_limited(raw: Raw) -> None:
    size = 4 * 1024 * 1024 - 100
    for stream in range(1, 9, 2):
        await raw.send(frame(HEADERS, END_HEADERS, stream, block()))
        await upload(raw, stream, struct.pack(">BI", 0, size) + b"x" * (size - 20_000))
        assert not raw.answers[stream].ended
    await raw.send(frame(HEADERS, END_HEADERS, 9, block()))
    await upload(raw, 9, struct.pack(">BI", 0, size) + b"x" * (size - 20_000))
    assert (await raw.answer(9)).status == "8"
    await raw.assert_open()


async def upload(raw: Raw, stream: int, data: bytes, *, end: bool = False) -> None:
    """Sends data as the windows allow, until the stream ends."""
    windows = {0: 65535, stream: 65535}
    for key in windows:
        windows[key] += sum(one.window_increment for one in raw.seen if updates(one, key)) - raw.sent.get(key, 0)
    position = 0
    while position < len(data) and not raw.answers[stream].ended:
        size = min(*windows.values(), 16384, len(data) - position)
        if size:
            part, last = data[position : position + size], position + size == len(data)
            await raw.send(frame(DATA, END_STREAM if end and last else 0, stream, part))
            position += size
            for key in windows:
                windows[key] -= size
                raw.sent[key] = raw.sent.get(key, 0) + size
        else:
            found = await raw.next()
            for key in windows:
                windows[key] += found.window_increment if updates(found, key) else 0


def updates(found: object, stream: int) -> bool:
    return isinstance(found, WindowUpdateFrame) and found.stream_id == stream
