"""Several calls at once on a gRPC channel."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http2 import END_HEADERS, END_STREAM, HEADERS, Raw, frame, setting
from rpcchannels import Double, call, call_all, end, fields, good, respond_with, running_double
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
