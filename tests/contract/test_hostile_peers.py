"""Hostile peers of a plugin's socket: the kubelet's calls must still be answered."""

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import pytest
from gadgets import Table, gadgets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import SERVICE, Peer, refusal
from thoroughness import examples
from waiting import until

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.server import ResourceServer
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings

HYPOTHESIS = settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class PluginPeer:
    """A plugin's socket, and a valid client."""

    def __init__(self, path: str, server: ResourceServer, peer: Peer) -> None:
        self.path = path
        self.server = server
        self.peer = peer

    async def answers(self) -> None:
        (container,) = await self.peer.allocate(["a"])
        assert container.devices[0].host_path == "/dev/a"

    async def send_and_receive(self, data: bytes) -> bytes:
        """Sends bytes, and reads the immediate response."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(5):
                return await reader.read(65536)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def plugin_peer(directory: str) -> AsyncIterator[PluginPeer]:
    os.mkdir(f"{directory}/device-plugins")
    plugin = Table(gadgets("a"))
    agent = Agent(Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi"), {"table": plugin})
    task = asyncio.create_task(agent.run())
    path = f"{directory}/device-plugins/example.com-gadget.sock"
    await until(lambda: os.path.exists(path))
    async with Peer(path) as peer:
        server = agent.runners["table"].publisher.served["gadget"].server
        yield PluginPeer(path, server, peer)
    agent.stop()
    async with asyncio.timeout(5):
        await task


# Invalid gRPC


async def test_a_message_over_the_limit_is_rejected_with_its_size(plugin_peer: PluginPeer) -> None:
    code, text = await refusal(plugin_peer.peer.allocate(["x" * (4 * 1024 * 1024)]))
    assert code == "RESOURCE_EXHAUSTED"
    assert "expected at most 4194304" in text
    await plugin_peer.answers()


async def test_a_message_just_below_the_limit_is_read(plugin_peer: PluginPeer) -> None:
    code, text = await refusal(plugin_peer.peer.allocate(["x" * (4 * 1024 * 1024 - 1000)]))
    assert (code, "unknown device" in text) == ("UNKNOWN", True)


async def test_a_compressed_message_is_rejected_with_a_message(plugin_peer: PluginPeer) -> None:
    code, text = await refusal(plugin_peer.peer.allocate(["a" * 5000], compression=grpc.Compression.Gzip))
    assert (code, text) == ("UNIMPLEMENTED", "compressed messages are not supported")
    await plugin_peer.answers()


@pytest.mark.parametrize("method", ["Deallocate", "/v1.DevicePlugin/Allocate", "/", "/v1beta1.Registration/Register"])
async def test_a_method_that_does_not_exist_is_unimplemented(plugin_peer: PluginPeer, method: str) -> None:
    assert (await refusal(plugin_peer.peer.call(method, pb.Empty(), pb.Empty)))[0] == "UNIMPLEMENTED"
    await plugin_peer.answers()


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x0a" + b"\xff" * 20])
async def test_invalid_messages_are_an_invalid_argument(plugin_peer: PluginPeer, data: bytes) -> None:
    assert await refusal(plugin_peer.peer.call("Allocate", data, pb.AllocateResponse)) == (
        "INVALID_ARGUMENT", "cannot decode the request, expected AllocateRequest",
    )  # fmt: skip


# HTTP/2 streams


class Frames:
    """An HTTP/2 client that sends any frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.connection = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.connection.initiate_connection()
        self.ended = False

    def request(self, *changes: tuple[str, str | None], end: bool = False) -> int:
        """Headers of an Allocate call, with changed or omitted (None) fields."""
        headers = {
            ":method": "POST", ":scheme": "http", ":path": f"{SERVICE}Allocate", ":authority": "localhost",
            "te": "trailers", "content-type": "application/grpc", **dict(changes),
        }  # fmt: skip
        stream = self.connection.get_next_available_stream_id()
        pairs = [(key, value) for key, value in headers.items() if value is not None]
        self.connection.send_headers(stream, pairs, end_stream=end)
        return stream

    async def flush(self) -> None:
        self.writer.write(self.connection.data_to_send())
        await self.writer.drain()

    async def answer(self, stream: int) -> dict[str, str]:
        """All headers received on a stream until it or the connection ends."""
        await self.flush()
        headers: dict[str, str] = {}
        async with asyncio.timeout(5):
            while data := await self.reader.read(65536):
                for event in self.connection.receive_data(data):
                    found = getattr(event, "headers", None)
                    if found and getattr(event, "stream_id", 0) == stream:
                        headers |= {_text(key): _text(value) for key, value in found}
                    if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset) and event.stream_id == stream:
                        return headers
                await self.flush()
        self.ended = True
        return headers


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


@pytest.fixture
async def frames(plugin_peer: PluginPeer) -> AsyncIterator[Frames]:
    reader, writer = await asyncio.open_unix_connection(plugin_peer.path)
    yield Frames(reader, writer)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_stream_that_ends_within_a_message_gets_an_error(plugin_peer: PluginPeer, frames: Frames) -> None:
    stream = frames.request()
    frames.connection.send_data(stream, struct.pack(">BI", 0, 100) + b"too few", end_stream=True)
    assert (await frames.answer(stream))["grpc-status"] in ("3", "13")
    await plugin_peer.answers()


async def test_a_stream_without_a_message_gets_an_error(plugin_peer: PluginPeer, frames: Frames) -> None:
    headers = await frames.answer(frames.request(end=True))
    assert (headers["grpc-status"], headers["grpc-message"]) == ("3", "no message in the request")


async def test_a_message_with_a_too_large_length_prefix_is_rejected_before_its_data(
    plugin_peer: PluginPeer, frames: Frames
) -> None:
    stream = frames.request()
    frames.connection.send_data(stream, struct.pack(">BI", 0, 0xFFFF_FFFF))
    assert (await frames.answer(stream))["grpc-status"] == "8"


async def test_a_request_without_its_message_is_cancelled_with_its_connection(
    plugin_peer: PluginPeer, frames: Frames
) -> None:
    for _ in range(50):
        frames.connection.send_data(frames.request(), struct.pack(">BI", 0, 10))
    await frames.flush()
    await plugin_peer.answers()


@pytest.mark.parametrize(
    "change",
    [
        (":method", "GET"), (":path", "nowhere"), ("te", None), ("te", "none"),
        ("content-type", None), ("content-type", "text/html"), ("grpc-timeout", "soon"), ("grpc-timeout", "0n"),
        (":authority", "\u2603"), ("x-odd-bin", "!!!"), ("x-odd", "\xff"), ("x" * 60_000, "1"),
    ],
    ids=lambda change: f"{change[0][:20]}={change[1]}",
)  # fmt: skip
async def test_invalid_headers_end_the_call_or_the_connection(
    plugin_peer: PluginPeer, frames: Frames, change: tuple[str, str | None]
) -> None:
    stream = frames.request(change)
    frames.connection.send_data(stream, struct.pack(">BI", 0, 0), end_stream=True)
    headers = await frames.answer(stream)
    assert frames.ended or headers.get(":status") != "200" or "grpc-status" in headers
    await plugin_peer.answers()


@pytest.mark.parametrize("omitted", [":method", ":path"])
async def test_an_empty_request_affects_no_others(plugin_peer: PluginPeer, frames: Frames, omitted: str) -> None:
    frames.request((omitted, None), end=True)
    await frames.flush()
    await plugin_peer.answers()


async def test_a_stream_that_is_reset_twice_affects_no_others(plugin_peer: PluginPeer, frames: Frames) -> None:
    stream = frames.request((":path", f"{SERVICE}ListAndWatch"))
    frames.connection.send_data(stream, struct.pack(">BI", 0, 0), end_stream=True)
    await frames.flush()
    await until(lambda: len(plugin_peer.server._streams) == 1)
    reset = struct.pack(">I", 4)[1:] + bytes((3, 0)) + struct.pack(">II", stream, 8)
    frames.writer.write(reset * 3)
    await frames.writer.drain()
    await until(lambda: len(plugin_peer.server._streams) == 0)
    await plugin_peer.answers()


async def test_a_peer_without_flow_control_window_delays_only_its_own_responses(
    plugin_peer: PluginPeer, frames: Frames
) -> None:
    frames.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    stream = frames.request((":path", f"{SERVICE}ListAndWatch"))
    frames.connection.send_data(stream, struct.pack(">BI", 0, 0), end_stream=True)
    await frames.flush()
    await until(lambda: len(plugin_peer.server._streams) == 1)
    await plugin_peer.answers()
    frames.writer.close()
    await until(lambda: len(plugin_peer.server._streams) == 0)


# Any bytes


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1beta1.DevicePlugin/Allocate HTTP/1.1\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        b"\0" * 100_000,
        PREFACE + b"\xff" * 1000,
        PREFACE + SETTINGS + bytes((0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 1)),
        PREFACE + SETTINGS + bytes((0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    ],
    ids=["HTTP/1 GET", "HTTP/1 POST", "TLS", "zeros", "preface and junk", "endless frame", "window of nothing"],
)
async def test_invalid_grpc_affects_only_its_connection(plugin_peer: PluginPeer, data: bytes) -> None:
    await plugin_peer.send_and_receive(data)
    await plugin_peer.answers()


async def test_frames_of_unknown_types_are_ignored(plugin_peer: PluginPeer) -> None:
    unknown = bytes((0, 0, 3, 0xEE, 0, 0, 0, 0, 0)) + b"abc"
    ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"are-you?"
    reader, writer = await asyncio.open_unix_connection(plugin_peer.path)
    writer.write(PREFACE + SETTINGS + unknown + ping)
    answer = b""
    async with asyncio.timeout(5):
        while b"are-you?" not in answer:
            data = await reader.read(1000)
            assert data, "the connection was ended"
            answer += data
    writer.close()
    await plugin_peer.answers()


@HYPOTHESIS
@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", PREFACE, PREFACE + SETTINGS]))
async def test_any_bytes_leave_the_plugin_responsive(plugin_peer: PluginPeer, data: bytes, prefix: bytes) -> None:
    _reader, writer = await asyncio.open_unix_connection(plugin_peer.path)
    with contextlib.suppress(ConnectionError):
        writer.write(prefix + data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await plugin_peer.answers()


# Many connections


async def test_hundreds_of_idle_connections_leave_the_plugin_responsive_and_are_closed_with_it(
    plugin_peer: PluginPeer,
) -> None:
    connections = [await asyncio.open_unix_connection(plugin_peer.path) for _ in range(300)]
    await plugin_peer.answers()
    for _reader, writer in connections[:150]:
        writer.close()
    await plugin_peer.answers()
    for _reader, writer in connections[150:]:
        writer.transport.abort()
    await asyncio.sleep(0)


async def test_hundreds_of_streams_all_get_the_list_and_leak_nothing(plugin_peer: PluginPeer) -> None:
    peers = [Peer(plugin_peer.path) for _ in range(100)]
    calls = [peer.stream() for peer in peers for _ in range(3)]
    async with asyncio.timeout(30):
        messages = await asyncio.gather(*(call.read() for call in calls))
    assert {message.devices[0].ID for message in messages} == {"a"}
    await plugin_peer.answers()
    for call in calls:
        call.cancel()
    await asyncio.gather(*(peer.close() for peer in peers))
    await until(lambda: len(plugin_peer.server._streams) == 0)


async def test_a_client_that_never_reads_does_not_delay_others(plugin_peer: PluginPeer) -> None:
    _reader, writer = await asyncio.open_unix_connection(plugin_peer.path)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"are-you?"
    writer.write(PREFACE + SETTINGS)
    for _ in range(200):
        writer.write(ping * 500)
        with contextlib.suppress(TimeoutError, ConnectionError):  # the server may end it
            async with asyncio.timeout(0.01):
                await writer.drain()
    await plugin_peer.answers()
    writer.transport.abort()


async def test_connections_leave_no_descriptors_behind(
    plugin_peer: PluginPeer, count_descriptors: Callable[[], int]
) -> None:
    await plugin_peer.answers()
    before = count_descriptors()
    for _ in range(50):
        _reader, writer = await asyncio.open_unix_connection(plugin_peer.path)
        writer.write(PREFACE + SETTINGS)
        writer.close()
        await writer.wait_closed()
    await until(lambda: count_descriptors() <= before)


@pytest.fixture
def count_descriptors() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))
