"""Our gRPC with the reference implementation as client and as server: long messages, many calls, deadlines."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from http2 import Methods, serving
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from accelplane.rpc import Channel, RpcError, RpcServer, unary
from accelplane.rpc.server import SHUTDOWN_GRACE

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture
def path(directory: str) -> str:
    return f"{directory}/s"


@pytest.fixture
async def methods(path: str) -> AsyncIterator[Methods]:
    async with serving(path) as methods:
        yield methods


class Client:
    """A server of the reference implementation."""

    def __init__(self, path: str, *options: tuple[str, Any]) -> None:
        local = ("grpc.use_local_subchannel_pool", 1)
        authority = ("grpc.default_authority", "localhost")
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=(local, authority, *UNLIMITED, *options))

    def call(self, method: str, content: bytes = b"", **more: Any) -> Any:
        return self.channel.unary_unary(f"/t.T/{method}", BytesValue.SerializeToString, BytesValue.FromString)(
            BytesValue(value=content), **{"timeout": 10, **more}
        )

    def stream(self, method: str, content: bytes = b"", **more: Any) -> Any:
        return self.channel.unary_stream(f"/t.T/{method}", BytesValue.SerializeToString, BytesValue.FromString)(
            BytesValue(value=content), **more
        )


@pytest.fixture
async def client(methods: Methods, path: str) -> AsyncIterator[Client]:
    client = Client(path)
    yield client
    await client.channel.close()


# Reference client, own server


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 65_530, 65_536, 1_000_000, 4_000_000])
async def test_messages_of_any_length_go_both_ways(client: Client, size: int) -> None:
    content = os.urandom(size)
    assert (await client.call("Echo", content)).value == content


async def test_a_client_with_small_windows_receives_everything(methods: Methods, path: str) -> None:
    client = Client(path, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    assert len((await client.call("Big", b"3000000")).value) == 3_000_000
    await client.channel.close()


async def test_hundreds_of_concurrent_calls_are_answered(client: Client) -> None:
    contents = [str(turn).encode() * 5000 for turn in range(300)]
    answers = await asyncio.gather(*(client.call("Echo", content) for content in contents))
    assert [answer.value for answer in answers] == contents


async def test_a_stream_of_thousands_of_messages_keeps_its_order(client: Client) -> None:
    received = [message.value async for message in client.stream("Count", b"5000")]
    assert received == [str(count).encode() for count in range(5000)]


async def test_a_client_that_does_not_read_blocks_only_its_stream(methods: Methods, path: str) -> None:
    client = Client(path, ("grpc.http2.bdp_probe", 0))
    call = client.stream("Flood")
    await call.read()
    await until(lambda: methods.sent > 50_000)
    for _ in range(20):
        await client.call("Echo", b"x" * 10_000)
    assert methods.sent < 1_000_000
    received = [len((await call.read()).value) for _ in range(100)]
    assert sum(received) == 1_000_000
    call.cancel()
    await until(lambda: methods.cancelled == 1)
    await client.channel.close()


async def test_cancelled_and_expired_calls_end_their_handlers(methods: Methods, client: Client) -> None:
    calls = [client.call("Wait") for _ in range(20)]
    late = [client.call("Wait", timeout=0.1) for _ in range(20)]
    await until(lambda: methods.running == 40)
    for call in calls:
        call.cancel()
    for call in late:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: methods.cancelled == 40)
    assert (await client.call("Echo", b"still here")).value == b"still here"


async def test_errors_reach_the_client_with_their_text(client: Client) -> None:
    for text in ("", "plain", "50 % «of»\r\nthis\0", "x" * 2000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Refuse", text.encode())
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, text)


TEXTS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=200)


@given(
    calls=st.lists(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9.]{0,20}", fullmatch=True), TEXTS), max_size=20)),
)
async def test_metadata_is_ignored(client: Client, calls: list[list[tuple[str, str]]]) -> None:
    for pairs in calls:
        metadata = [(f"x-{name}", value) for name, value in pairs] + [("x-data-bin", bytes(range(256)))]
        assert (await client.call("Echo", b"a", metadata=metadata)).value == b"a"


async def test_a_client_reconnects_to_a_restarted_server(directory: str) -> None:
    path = f"{directory}/s"
    client = Client(path)

    async def answered() -> bool:
        try:
            return (await client.call("Echo", b"a", wait_for_ready=True)).value == b"a"
        except grpc.aio.AioRpcError:
            return False  # it has not noticed yet that the connection is gone

    for _ in range(3):
        async with serving(path):
            await until(answered)
        os.unlink(path)
    await client.channel.close()


async def test_a_stopping_server_ends_the_clients_streams(methods: Methods, client: Client) -> None:
    watching = client.stream("Watch")
    waiting = client.call("Wait", b"a")
    await watching.read()
    await until(lambda: methods.running == 2)
    stopping = asyncio.create_task(methods.server.stop())
    assert await watching.code() is grpc.StatusCode.UNAVAILABLE
    methods.release.set()
    assert (await waiting).value == b"a"
    await stopping


async def test_a_call_has_the_grace_of_the_stop_to_finish(methods: Methods, client: Client) -> None:
    waiting = client.call("Wait", b"a", timeout=60)
    await until(lambda: methods.running == 1)
    stopping = asyncio.create_task(methods.server.stop(grace=60))
    await asyncio.sleep(4 * SHUTDOWN_GRACE)
    assert not stopping.done()
    methods.release.set()
    assert (await waiting).value == b"a"
    async with asyncio.timeout(30):
        await stopping


async def test_a_server_knows_its_connections(directory: str) -> None:
    counts: list[int] = []
    server = RpcServer(
        {"/s/Echo": unary(BytesValue, BytesValue, echo)}, connections_changed=lambda: counts.append(server.connections)
    )
    await server.start(f"{directory}/s")
    try:
        for _ in range(2):
            async with Channel(f"{directory}/s") as channel:
                assert (await channel.call("/s/Echo", BytesValue(value=b"a"), BytesValue, deadline=30)).value == b"a"
                assert server.connections == 1
            await until(lambda: server.connections == 0)
    finally:
        await server.stop()
    assert counts == [1, 0, 1, 0]


async def echo(request: BytesValue) -> BytesValue:
    return request


# Own client, reference server


class Reference(grpc.GenericRpcHandler):
    """The same methods, with metadata in the responses."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.running = 0
        self.sent = 0

    def service(self, details: Any) -> Any:
        method = getattr(self, details.method.rpartition("/")[2].lower(), None)
        make = grpc.unary_stream_rpc_method_handler if method == self.flood else grpc.unary_unary_rpc_method_handler
        return method and make(method, BytesValue.FromString, BytesValue.SerializeToString)

    async def echo(self, request: BytesValue, context: Any) -> BytesValue:
        await context.send_initial_metadata((("x-initial", "y" * 300), ("x-some-bin", b"\0\xff")))
        context.set_trailing_metadata((("x-trailing", "z" * 300), ("x-more-bin", b"\0\xff")))
        return request

    async def wait(self, _request: BytesValue, _context: Any) -> BytesValue:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            self.cancelled += 1
        raise AssertionError

    async def refuse(self, request: BytesValue, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, request.value.decode())

    async def fail(self, _request: BytesValue, _context: Any) -> None:
        raise ValueError("on purpose")

    async def flood(self, _request: BytesValue, _context: Any) -> AsyncIterator[BytesValue]:
        try:
            while True:
                yield BytesValue(value=b"x" * 10_000)
                self.sent += 10_000
        finally:
            self.cancelled += 1


@asynccontextmanager
async def reference(path: str) -> AsyncIterator[Reference]:
    service = Reference()
    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)


@pytest.fixture
async def service(path: str) -> AsyncIterator[Reference]:
    async with reference(path) as service:
        yield service


@pytest.fixture
async def channel(service: Reference, path: str) -> AsyncIterator[Channel]:
    async with Channel(path, max_message=5_000_000) as channel:
        yield channel


async def ask(channel: Channel, method: str, content: bytes = b"", deadline: float = 10) -> bytes:
    request = BytesValue(value=content)
    return (await channel.call(f"/t.T/{method}", request, BytesValue, deadline=deadline)).value


@pytest.mark.parametrize("size", [0, 1, 16_380, 65_536, 1_000_000, 4_900_000])
async def test_the_channel_sends_and_receives_messages_of_any_length(channel: Channel, size: int) -> None:
    content = os.urandom(size)
    assert await ask(channel, "Echo", content) == content


async def test_a_response_over_the_limit_fails_only_its_call(channel: Channel) -> None:
    with pytest.raises(RpcError, match="RESOURCE_EXHAUSTED"):
        await ask(channel, "Echo", b"x" * 6_000_000)
    assert await ask(channel, "Echo", b"a") == b"a"


async def test_hundreds_of_concurrent_calls_of_the_channel_are_answered(channel: Channel) -> None:
    contents = [str(turn).encode() * 5000 for turn in range(300)]
    assert await asyncio.gather(*(ask(channel, "Echo", content) for content in contents)) == contents


async def test_the_server_sees_cancelled_and_expired_calls_of_the_channel(service: Reference, channel: Channel) -> None:
    tasks = [asyncio.create_task(ask(channel, "Wait")) for _ in range(10)]
    await until(lambda: service.running == 10)
    for task in tasks:
        task.cancel()
    await until(lambda: service.cancelled == 10)
    late = [asyncio.create_task(ask(channel, "Wait", deadline=0.5)) for _ in range(10)]
    for task in late:
        with pytest.raises(RpcError, match="DEADLINE_EXCEEDED"):
            await task
    await until(lambda: service.running == 0)
    assert await ask(channel, "Echo", b"a") == b"a"


async def test_the_channel_receives_status_messages(channel: Channel) -> None:
    for text in ("", "plain", "50 % «of»\r\nthis"):
        with pytest.raises(RpcError) as caught:
            await ask(channel, "Refuse", text.encode())
        assert (caught.value.code, caught.value.text) == ("NOT_FOUND", text)
    with pytest.raises(RpcError, match="on purpose"):
        await ask(channel, "Fail")
    with pytest.raises(RpcError, match="UNIMPLEMENTED"):
        await ask(channel, "Nothing")


async def test_the_channel_applies_flow_control_and_cancels_streams(service: Reference, channel: Channel) -> None:
    stream = channel.stream("/t.T/Flood", BytesValue(), BytesValue)
    received = 0
    async for message in stream:
        if received == 0:
            await until(lambda: service.sent > 50_000)
            for _ in range(20):
                await ask(channel, "Echo", b"x" * 10_000)
            assert service.sent < 1_000_000
        received += len(message.value)
        if received >= 2_000_000:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: service.cancelled == 1)


async def test_the_channel_reconnects_to_a_restarted_server(path: str) -> None:
    async with Channel(path) as channel:
        for _ in range(2):
            async with reference(path):
                assert await ask(channel, "Echo", b"a") == b"a"
            with pytest.raises(RpcError, match="UNAVAILABLE"):
                await ask(channel, "Echo", b"a")
