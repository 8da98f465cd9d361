"""A gRPC channel that is closed or loses its connection."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from http2 import GOAWAY, PING, WINDOW_UPDATE, Raw, frame, number, serving, setting
from hyperframe.frame import HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame
from rpcchannels import Double, call, call_all, failure, good, respond_with, running_double
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
