"""TLS and proxies of the HTTP client."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from httppeers import OK, Server, connected, fetch

from accelplane.http.client import HttpClient, ProtocolError, Proxy
from accelplane.http.stream import ConnectError

AUTHORITY = Authority("tests")


def serving_context(directory: Path, name: str = "localhost") -> ssl.SSLContext:
    pair = AUTHORITY.server(name, name)
    (directory / "pair").write_bytes(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "pair")
    return context


def client_context(authority: Authority = AUTHORITY) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.credentials.certificate.decode())


async def test_large_bodies_are_sent_and_received_over_tls(tmp_path: Path) -> None:
    large = bytes(range(256)) * 4096
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(large), large), OK)
    async with server.serving(serving_context(tmp_path)), connected(server, client_context()) as client:
        assert await fetch(client, "PUT", body=large) == large
        assert await fetch(client) == b"ok"
    assert server.requests[0].endswith(large)
    assert len(server.connections) == 1


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("elsewhere", {}, "CERTIFICATE_VERIFY_FAILED"),
        ("localhost", {"server_name": "elsewhere"}, "CERTIFICATE_VERIFY_FAILED"),
        ("localhost", {"authority": Authority("x")}, "CERTIFICATE_VERIFY_FAILED"),
        ("localhost", {"server_name": ".x"}, "label empty or too long"),
    ],
)
async def test_a_server_that_cannot_be_verified_gets_no_request(
    tmp_path: Path, name: str, options: dict[str, Any], problem: str
) -> None:
    server = Server(OK)
    context = client_context(options.pop("authority", AUTHORITY))
    async with server.serving(serving_context(tmp_path, name)), connected(server, context, **options) as client:
        with pytest.raises(ConnectError, match=problem):
            await fetch(client)
    assert server.requests == []


async def test_the_server_name_is_verified_in_place_of_the_host(tmp_path: Path) -> None:
    server = Server(OK)
    options = {"server_name": "elsewhere"}
    async with (
        server.serving(serving_context(tmp_path, "elsewhere")),
        connected(server, client_context(), **options) as client,
    ):
        assert await fetch(client) == b"ok"


@pytest.mark.parametrize("greeting", [b"", b"220 mail\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_server_without_tls_is_a_connect_error(greeting: bytes) -> None:
    async def send_greeting(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(send_greeting, "127.0.0.1", 0) as plain:
        client = HttpClient("127.0.0.1", plain.sockets[0].getsockname()[1], context=client_context)
        with pytest.raises(ConnectError):
            await fetch(client)


async def test_a_replaced_context_gets_new_connections(tmp_path: Path) -> None:
    contexts = [client_context(), client_context()]
    server = Server(OK, OK, OK)
    async with server.serving(serving_context(tmp_path)):
        client = HttpClient("localhost", server.port, context=lambda: contexts[0])
        await fetch(client)
        await fetch(client)
        assert len(server.connections) == 1
        del contexts[0]
        await fetch(client)
        assert len(server.connections) == 2
        client.close()


@pytest.mark.parametrize("value", ["Bearer secret\r\nX-Other: y", "Bearer secr\u00e9t", "secret\x00"])
async def test_a_token_of_two_lines_is_not_a_second_field_and_not_in_the_error(value: str) -> None:
    server = Server(OK)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ProtocolError, match="header field Authorization contains") as raised:
            async with client.request("GET", "/", [("Authorization", value)]):
                pass
    assert "secr" not in str(raised.value)


async def test_a_closed_port_is_a_connect_error() -> None:
    server = Server()
    async with server.serving():
        pass
    async with connected(server) as client:
        with pytest.raises(ConnectError, match=f"localhost:{server.port}: Connection refused"):
            await fetch(client)


TUNNEL = b"HTTP/1.1 200 Connection established\r\n\r\n"


@contextlib.asynccontextmanager
async def proxying(
    server: Server, answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n"
) -> AsyncIterator[Any]:
    """A proxy that tunnels to the server, and the heads that it received."""
    heads: list[bytes] = []
    tunnels: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tunnels.add(task)
        with contextlib.closing(writer):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            if answer == TUNNEL:
                upstream_reader, sender = await asyncio.open_connection("localhost", server.port)
                await asyncio.gather(copy(reader, sender), copy(upstream_reader, writer))

    async with await asyncio.start_server(tunnel, "127.0.0.1", 0) as listening:
        try:
            yield Proxy("127.0.0.1", listening.sockets[0].getsockname()[1], "Basic dTpw"), heads
        finally:
            for task in tunnels:
                task.cancel()
            await asyncio.gather(*tunnels, return_exceptions=True)
            await asyncio.sleep(0)  # closed transports are removed in the next iteration of the loop


async def test_a_proxy_tunnels_to_the_server_which_is_verified(tmp_path: Path) -> None:
    server = Server(OK, OK)
    async with (
        server.serving(serving_context(tmp_path)),
        proxying(server) as (proxy, heads),
        connected(server, client_context(), proxy=proxy) as client,
    ):
        assert await fetch(client) == b"ok"
        assert await fetch(client) == b"ok"
    target = f"localhost:{server.port}".encode()
    assert heads == [b"CONNECT %s HTTP/1.1\r\nHost: %s\r\nProxy-Authorization: Basic dTpw\r\n\r\n" % (target, target)]
    assert b"Proxy-Authorization" not in b"".join(server.requests)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
            "found 407 Proxy Authentication Required",
        ),
        (b"", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\n\r\nbytes of nobody", "expected 200 and a tunnel"),
        (b"nonsense\r\n\r\n", "expected a status line"),
    ],
)
async def test_a_proxy_that_rejects_the_tunnel_is_reported(tmp_path: Path, answer: bytes, problem: str) -> None:
    server = Server(OK)
    async with (
        server.serving(serving_context(tmp_path)),
        proxying(server, answer) as (proxy, _),
        connected(server, client_context(), proxy=proxy) as client,
    ):
        with pytest.raises(ConnectError, match=f"proxy 127.0.0.1:{proxy.port}: .*{problem}") as raised:
            await fetch(client)
    assert "dTpw" not in str(raised.value)
    assert server.requests == []
