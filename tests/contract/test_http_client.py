"""The HTTP client with valid, invalid, slow and hostile servers, over plain sockets and TLS."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from accelplane.http.client import HttpClient, HttpClientError, ProtocolError, Proxy
from accelplane.http.stream import ConnectError, ConnectionLost

AUTHORITY = Authority("tests")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Sends the next of its answers to each request; ends the connection after the last, an empty one, and `closing`.

    With `together`, all answers are pieces of one response.
    """

    def __init__(self, *answers: bytes, together: bool = False, closing: bytes | None = None) -> None:
        self.answers = list(answers)
        self.together = together
        self.closing = closing
        self.open = 0
        self.requests: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in self.connections:
                if not writer.transport.is_closing():
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        self.open += 1
        with contextlib.suppress(OSError, EOFError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.rstrip().split(b"\r\n")[1:])
                self.requests.append(head + await reader.readexactly(int(fields.get(b"content-length", b"0"))))
                answer = self.answers.pop(0)
                writer.write(answer)
                while self.together and self.answers:
                    await writer.drain()
                    await asyncio.sleep(0)
                    writer.write(self.answers.pop(0))
                if answer in (b"", self.closing):
                    break
        writer.close()
        self.open -= 1


LIMIT = 10 * 1024 * 1024


@contextlib.asynccontextmanager
async def connected(server: Server, context: ssl.SSLContext | None = None, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient("localhost", server.port, context=(lambda: context) if context else None, **options)
    try:
        yield client
    finally:
        client.close()


async def fetch(client: HttpClient, method: str = "GET", target: str = "/", *, body: bytes | None = None) -> bytes:
    async with asyncio.timeout(30), client.request(method, target, (), body) as response:
        return await response.read(LIMIT)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200\r\nCONTENT-LENGTH:0\r\n\r\n", b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n",
            b"ok0123456789",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n", b""),
    ],
)
async def test_a_body_ends_at_the_end_of_its_framing(answer: bytes, body: bytes) -> None:
    server = Server(answer)
    async with server.serving(), connected(server) as client:
        assert await fetch(client) == body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (CHUNKED + b"zz\r\nok\r\n", "a chunk of size b'zz'"),
        (CHUNKED + b"-2\r\nok\r\n", "a chunk of size b'-2'"),
        (CHUNKED + b"0x2\r\nok\r\n", "a chunk of size b'0x2'"),
        (CHUNKED + b"1" * 13 + b"\r\n", "a chunk of size"),
        (CHUNKED + b"2\r\nokay\r\n", "b'ay' at the end of a chunk"),
        (CHUNKED + b"2\nok\n0\n\n" + b"x" * 2000, "a line of more than"),
        (CHUNKED + b"1" * 2000, "a line of more than"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 1000, "more than 100 trailer fields"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "transfer-encoding 'gzip, chunked'"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nok",
            "content-length '2'",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n\r\nok", "transfer-encoding ''"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n", "the header field b'Transfer-Encoding : chunked'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", "two different"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "content-length '-1'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n", "content-length '.1'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n", "content-length '1, 1'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n", "content-length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 16 + b"\r\n\r\n", "content-length '9999999999999999'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok", "two different content-length"),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", "the header field b'no header'"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n folded: c\r\n\r\n", "the header field b' folded: c'"),
        (b"HTTP/1.1 200 OK\r\nA: b\nContent-Length: 3\r\n\r\n", "the header field"),
        (b"HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n", "the header field"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok" + b"x" * 70000, "a head of more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"\r\n", "101 header fields, expected at most 100"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000, "a head of more than 65536 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 9 + OK, "more than 8 interim responses"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "101 Switching Protocols"),
        (b"HTTP/2 200 OK\r\n\r\n", "expected a status line"),
        (b"HTTP/1.1 099 x\r\n\r\n", "expected a status line"),
        (b"HTTP/1.1 20 x\r\n\r\n", "expected a status line"),
        (b"HTTP/1.1  200 OK\r\n\r\n", "expected a status line"),
        (b"ICY 200 OK\r\n\r\n", "expected a status line"),
        (b"SSH-2.0-x\r\n\r\n", "expected a status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11000000\r\n\r\n" + b" " * 11_000_000, "a body of more than 10485760"),
    ],
    ids=lambda value: value[:60] if isinstance(value, bytes) else "",
)
async def test_a_response_that_violates_http_or_a_limit_is_rejected(answer: bytes, problem: str) -> None:
    server = Server(answer)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ProtocolError, match=problem):
            await fetch(client)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"2\r\nok\r\n0\r\n",
    ],
)
async def test_a_truncated_response_is_a_lost_connection(answer: bytes) -> None:
    server = Server(answer)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ConnectionLost, match="closed the connection before the response was complete"):
            await fetch(client)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", OK[:-2], CHUNKED, CHUNKED + b"2\r\nok\r\n"]),
)
async def test_any_bytes_are_a_response_or_an_error_of_the_client(junk: bytes, before: bytes) -> None:
    server = Server(before + junk)
    async with server.serving(), connected(server) as client:
        with contextlib.suppress(HttpClientError):
            await fetch(client)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), st.integers(1, 40))
async def test_a_body_is_independent_of_framing_and_segmentation(chunks: list[bytes], cut: int) -> None:
    whole = b"".join(chunks)
    framed = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(whole), whole)
    for answer in (framed, plain):
        server = Server(*(answer[start : start + cut] for start in range(0, len(answer), cut)), together=True)
        async with server.serving(), connected(server) as client:
            assert await fetch(client) == whole


async def test_a_connection_is_used_again_after_a_complete_response() -> None:
    server = Server(OK, OK, OK)
    async with server.serving(), connected(server) as client:
        for body in (b"one", b"two"):
            assert await fetch(client, "POST", "/x", body=body) == b"ok"
        assert await fetch(client, "GET", "/y") == b"ok"
    assert [request.partition(b" HTTP")[0] for request in server.requests] == [b"POST /x", b"POST /x", b"GET /y"]
    assert [request.rpartition(b"\r\n\r\n")[2] for request in server.requests] == [b"one", b"two", b""]
    assert len(server.connections) == 1


async def read_part(client: HttpClient) -> None:
    async with client.request("GET", "/") as response, contextlib.aclosing(response.chunks()) as chunks:
        assert await anext(chunks)


async def read_none(client: HttpClient) -> None:
    async with client.request("GET", "/"):
        pass


async def fail(client: HttpClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.request("GET", "/"):
            raise ZeroDivisionError


@pytest.mark.parametrize("leave", [read_part, read_none, fail])
@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        OK,
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
    ],
)
async def test_a_connection_with_a_half_read_response_is_not_used_again(
    leave: Callable[[HttpClient], Any], first: bytes
) -> None:
    server = Server(first, OK)
    async with server.serving(), connected(server) as client:
        await leave(client)
        assert await fetch(client) == b"ok"
    assert len(server.connections) == 2


async def test_a_connection_with_more_bytes_than_the_response_is_not_used_again() -> None:
    server = Server(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsmuggle", OK)
    async with server.serving(), connected(server) as client:
        assert await fetch(client) == b"ok"
        assert await fetch(client) == b"ok"
    assert len(server.connections) == 2


async def test_bytes_that_arrive_while_a_connection_is_idle_end_it() -> None:
    server = Server(OK, OK, OK)
    async with server.serving(), connected(server) as client:
        assert await fetch(client) == b"ok"
        server.connections[0].write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsmuggle")
        await server.connections[0].drain()
        assert await fetch(client) == b"ok"
    assert len(server.connections) == 2


async def test_a_connection_that_its_server_closed_is_not_used_again() -> None:
    server = Server(OK, OK, OK)
    async with server.serving(), connected(server) as client:
        await fetch(client)
        server.connections[0].close()
        await server.connections[0].wait_closed()
        assert await fetch(client, "POST") == b"ok"
    assert len(server.connections) == 2


async def test_a_get_is_sent_again_when_a_used_connection_ends_before_the_response_and_a_post_is_not() -> None:
    for method, requests in (("GET", 3), ("POST", 2)):
        server = Server(OK, b"", OK)
        async with server.serving(), connected(server) as client:
            assert await fetch(client, method) == b"ok"
            if method == "GET":
                assert await fetch(client, method) == b"ok"
            else:
                with pytest.raises(ConnectionLost):
                    await fetch(client, method)
        assert len(server.requests) == requests


async def test_a_get_is_not_sent_again_after_a_part_of_its_response() -> None:
    part = b"HTTP/1.1 200 OK\r\nContent-"
    server = Server(OK, part, OK, closing=part)
    async with server.serving(), connected(server) as client:
        await fetch(client)
        with pytest.raises(ConnectionLost):
            await fetch(client)
    assert len(server.requests) == 2


async def test_idle_connections_are_closed_after_the_timeout_and_at_shutdown() -> None:
    server = Server(OK, OK, OK, OK)
    async with server.serving():
        async with connected(server, idle_timeout=0.05) as client:
            await fetch(client)
            await until(lambda: server.open == 0)
            await fetch(client)
        await until(lambda: server.open == 0)
        async with connected(server, idle_timeout=60) as client:
            await fetch(client)
        await until(lambda: server.open == 0)
    assert len(server.connections) == 3


async def test_without_idle_timeout_each_request_has_its_own_connection() -> None:
    server = Server(OK, OK)
    async with server.serving(), connected(server, idle_timeout=0) as client:
        await fetch(client)
        await fetch(client)
        assert len(server.connections) == 2
    assert all(b"\r\nConnection: close\r\n" in request for request in server.requests)


async def test_a_cancelled_request_closes_its_connection() -> None:
    server = Server(OK, CHUNKED + b"2\r\nok\r\n", OK)
    async with server.serving(), connected(server) as client:
        await fetch(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await fetch(client)
        await until(lambda: server.open == 0)


async def test_before_send_can_prevent_a_request() -> None:
    def refuse() -> None:
        raise ZeroDivisionError

    server = Server(OK, OK)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.request("PUT", "/", before_send=refuse):
                pass
        await until(lambda: server.open == 0)
        assert server.requests == []


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


@pytest.mark.parametrize("target", ["", "/a b", "/a\r\nX: y", "/\u00e9"])
async def test_a_target_that_is_more_than_a_target_is_rejected(target: str) -> None:
    server = Server(OK)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ProtocolError, match="request target"):
            await fetch(client, "GET", target)


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
