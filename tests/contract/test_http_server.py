"""The HTTP server: responses, limits and self-test."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from cluster.pki import Authority
from httpservers import Pages, get, reply, serving
from waiting import until

from accelplane.http.handler import PendingResponse
from accelplane.http.listening import bind, split_address
from accelplane.http.messages import HttpLimits, Request, Response
from accelplane.http.server import HttpServer
from accelplane.http.servingtls import ServingTls

SERVER = Authority("tests").server("localhost", "localhost")


async def test_a_pending_response_delays_only_later_responses_of_the_same_connection() -> None:
    pages = Pages()
    async with serving(pages) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now", "/later", "/now", "/later"))
        assert await reply(reader) == (200, "/now")
        other, another = await asyncio.open_connection("127.0.0.1", port)
        another.write(get("/now"))
        assert await reply(other) == (200, "/now")
        assert pages.requests == ["/now", "/later", "/now"]
        pages.released.set()
        assert [await reply(reader) for _ in range(3)] == [(200, "/later "), (200, "/now"), (200, "/later ")]
        writer.write(get("/later", field="Authorization: Bearer x\r\n"))
        assert await reply(reader) == (200, "/later Bearer x")
        writer.close()
        another.close()


@pytest.mark.parametrize(("path", "status"), [("/refused", 403), ("/fault", 500)])
async def test_an_exception_of_a_pending_response_becomes_an_error_response(path: str, status: int) -> None:
    pages = Pages()
    pages.released.set()
    async with serving(pages) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(path))
        found, text = await reply(reader)
        assert (found, "a fault" in text) == (status, False)
        writer.close()


async def test_a_pending_response_is_cancelled_when_its_client_disconnects() -> None:
    pages = Pages()
    async with serving(pages, HttpLimits(request=0.3)) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        await until(lambda: pages.requests == ["/later"])
        writer.transport.abort()
        await until(lambda: pages.cancelled == 1 and not server.connections)


@pytest.mark.parametrize("secure", [False, True])
async def test_the_end_of_a_client_is_noticed_while_its_response_is_pending(secure: bool, tmp_path: Path) -> None:
    pages = Pages()
    server = HttpServer(pages, HttpLimits(request=600, answer=600))
    (tmp_path / "tls.crt").write_bytes(SERVER.certificate)
    (tmp_path / "tls.key").write_bytes(SERVER.key)
    tls = ServingTls()
    tls.follow(str(tmp_path))
    port = await server.start("127.0.0.1", 0, tls.connection_context if secure else None)
    client = ssl.create_default_context(cadata=Authority("others").credentials.certificate.decode())
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client if secure else None)
    writer.write(get("/later"))
    await until(lambda: pages.requests == ["/later"])
    writer.close()
    await until(lambda: pages.cancelled == 1 and not server.connections)
    await server.stop(0.1)


@pytest.mark.parametrize("abort", [False, True])
async def test_a_client_that_sends_a_further_request_and_disconnects_is_noticed(abort: bool) -> None:
    pages = Pages()
    async with serving(pages, HttpLimits(request=600, answer=600, handshake=1)) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        _, other = await asyncio.open_connection("127.0.0.1", port)
        for each in (writer, other):
            each.write(get("/later", "/now"))
        await until(lambda: pages.requests == ["/later"] * 2)
        if abort:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: len(server.connections) == 1)
        assert (pages.cancelled, pages.requests) == (1, ["/later"] * 2)
        other.close()


async def test_a_client_that_sends_more_while_its_response_is_pending_is_read_later() -> None:
    pages = Pages()
    async with serving(pages) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        await until(lambda: pages.requests == ["/later"])
        count = 40_000
        writer.write(get("/now") * count)
        # The server reads one buffer; the rest fills the buffers of the kernel.
        await until(lambda: 0 < server.buffered <= 16 * 1024)
        (connection,) = server.connections
        assert not connection._transport.reading
        pages.released.set()
        assert await reply(reader) == (200, "/later ")
        for _ in range(count):
            assert await reply(reader) == (200, "/now")
        writer.close()


async def test_a_pending_response_can_be_cancelled_before_it_starts() -> None:
    pages = Pages()
    server = HttpServer(pages)
    port = await server.start("127.0.0.1", 0)

    def ask(request: Request) -> PendingResponse:
        for connection in list(server.connections):
            asyncio.get_running_loop().call_soon(connection.abort)
        return pages.later(request)

    server.handler = ask
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/later"))
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await server.stop()
    assert pages.cancelled == 0, "it started"


async def test_a_pending_response_times_out_with_503() -> None:
    pages = Pages()
    async with serving(pages, HttpLimits(request=0.2, linger=0.1)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        assert await reply(reader) == (503, "no answer within 0.2 s\n")
        assert pages.cancelled == 1
        assert await reader.read() == b""
        writer.close()


async def test_a_draining_server_closes_connections_after_a_response_and_accepts_new_ones() -> None:
    async with serving(Pages()) as (server, port):
        first, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now"))
        assert await reply(first) == (200, "/now")
        server.drain()
        writer.write(get("/now"))
        assert b"\r\nConnection: close\r\n" in await asyncio.wait_for(first.read(), 30)
        second, another = await asyncio.open_connection("127.0.0.1", port)
        another.write(get("/now"))
        assert (await asyncio.wait_for(second.read(), 30)).startswith(b"HTTP/1.1 200")
        writer.close()
        another.close()


async def test_stop_waits_for_pending_responses() -> None:
    pages = Pages()
    server = HttpServer(pages)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/later"))
    await until(lambda: pages.requests == ["/later"])
    ending = asyncio.create_task(server.stop(10))
    await asyncio.sleep(0)
    pages.released.set()
    assert await reply(reader) == (200, "/later ")
    assert await reader.read() == b""
    writer.close()
    await ending


async def test_duplicate_authorization_fields_are_rejected() -> None:
    pages = Pages()
    async with serving(pages) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now", field="Authorization: Bearer x\r\nauthorization: Bearer y\r\n"))
        assert (await reply(reader))[0] == 400
        writer.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
async def test_accepts_is_true_once_a_handshake_succeeds(host: str | None) -> None:
    tls = ServingTls()
    server, plain = HttpServer(Pages()), HttpServer(Pages())
    assert not await server.accepts()
    await server.start(host, 0, tls.connection_context)
    await plain.start(host, 0)
    assert not await server.accepts(), "there is no certificate yet"
    tls.use(SERVER.certificate, SERVER.key)
    assert await server.accepts()
    assert await plain.accepts()
    await until(lambda: not server.connections)
    await server.stop()
    await plain.stop()
    assert not await server.accepts()


async def test_accepts_is_false_at_the_connection_limit() -> None:
    tls = ServingTls()
    tls.use(SERVER.certificate, SERVER.key)
    server = HttpServer(Pages(), HttpLimits(connections=0))
    await server.start("127.0.0.1", 0, tls.connection_context)
    assert not await server.accepts()
    await server.stop()


async def test_head_requests_get_the_header_fields_without_the_body() -> None:
    server = HttpServer(Pages(), methods=("GET", "HEAD"))
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/now").replace(b"GET", b"HEAD") + get("/now"))
    assert b"\r\nContent-Length: 4\r\n" in await reader.readuntil(b"\r\n\r\n")
    assert await reply(reader) == (200, "/now")
    writer.write(get("/now").replace(b"GET", b"POST"))
    assert await reply(reader) == (405, "expected method GET or HEAD\n")
    writer.close()
    await server.stop(0)


async def test_every_address_of_a_host_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (family, socket.SOCK_STREAM, 0, "", (address, 0))
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2"))
    ]
    server = HttpServer(Pages())
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_arguments, **_more: found)
        port = await server.start("both.test", 0)
    assert server.addresses == [("127.0.0.1", port), ("127.0.0.2", port)]
    for host, _ in server.addresses:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(get("/now"))
        assert await reply(reader) == (200, "/now")
        writer.close()
    await server.stop(0)


def test_a_body_limit_over_the_memory_limit_is_rejected() -> None:
    with pytest.raises(ValueError, match="body: 8000000"):
        HttpLimits(body=8_000_000, memory=8_000_000)


@pytest.mark.parametrize(
    ("address", "found"), [(":8080", (None, 8080)), ("1.2.3.4:1", ("1.2.3.4", 1)), ("[::1]:2", ("::1", 2))]
)
def test_addresses_have_the_syntax_of_go_programs(address: str, found: tuple[str | None, int]) -> None:
    assert split_address(address) == found


@pytest.mark.parametrize("address", ["", "8080", ":", ":x", ":65536", ":-1"])
def test_an_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        split_address(address)


def test_a_port_in_use_is_an_error_with_the_text_of_the_kernel() -> None:
    (first,) = bind("127.0.0.1", 0, 1)
    with first, pytest.raises(OSError, match=r"^\[Errno \d+\] Address already in use$"):
        bind("127.0.0.1", first.getsockname()[1], 1)


async def test_a_large_response_is_sent_in_parts_and_counted_until_it_is_sent() -> None:
    body = os.urandom(2_000_000)
    server = HttpServer(lambda _request: Response(200, body))
    port = await server.start("127.0.0.1", 0)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(get("/now", "/now"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"Content-Length: 2000000" in head
    assert 100_000 < server.reserved <= 2_000_000
    async with asyncio.timeout(30):
        assert await reader.readexactly(len(body)) == body
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(body)) == body
    await until(lambda: server.reserved == 0)
    writer.close()
    await server.stop(0)


async def test_requests_in_flight_are_counted_by_path() -> None:
    pages = Pages()
    async with serving(pages) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in clients[:2]:
            writer.write(get("/later"))
        clients[2][1].write(get("/now"))
        assert await reply(clients[2][0]) == (200, "/now")
        await until(lambda: len(pages.requests) == 3)
        assert (server.in_flight("/later"), server.in_flight("/now")) == (2, 0)
        pages.released.set()
        for reader, _ in clients[:2]:
            assert (await reply(reader))[0] == 200
        assert server.in_flight("/later") == 0
        for _, writer in clients:
            writer.close()


async def test_stop_returns_after_the_cleanup_of_the_responses_that_it_cancels() -> None:
    begun, cleaned = asyncio.Event(), asyncio.Event()

    async def answer(_request: Request) -> Response:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            cleaned.set()
        raise AssertionError

    server = HttpServer(answer)
    port = await server.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/"))
    await begun.wait()
    await server.stop(grace=0)
    assert cleaned.is_set()
    writer.close()


async def test_stop_returns_after_the_end_of_open_streams() -> None:
    ended = asyncio.Event()

    async def parts() -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            ended.set()

    server = HttpServer(lambda _request: Response(200, b"", stream=parts()))
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/"))
    await reader.readuntil(b"first")
    await server.stop()
    assert ended.is_set()
    writer.close()
