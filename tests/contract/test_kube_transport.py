"""What the client's transport makes of what a server says, over plain sockets and over TLS."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from cluster.pki import Authority
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kube.transport import Transport

AUTHORITY = Authority("tests")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Says the next of its answers to each request, and what comes after the last one; b"" ends the connection."""

    def __init__(self, *answers: bytes, after: bytes = b"") -> None:
        self.answers = list(answers)
        self.after = after
        self.asked: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if context else 'http'}://localhost:{port}"
        try:
            yield
        finally:
            server.close()
            for writer in self.connections:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.rstrip().split(b"\r\n")[1:])
                self.asked.append(head + await reader.readexactly(int(fields.get(b"content-length", b"0"))))
                answer = self.answers.pop(0) if self.answers else self.after
                writer.write(answer)
                if not answer or not self.answers:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def asking(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, transport=Transport(context), timeout=5) as client:
        yield client


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
async def test_a_body_ends_where_its_server_says(answer: bytes, body: bytes) -> None:
    server = Server(answer)
    async with server.serving(), asking(server) as client:
        assert (await client.get("/")).content == body


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\n", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "closed the connection before"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n", "a chunk of size b'zz'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n", "a chunk that does not end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, "a line of more than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "Transfer-Encoding b'gzip, chunked'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length b'-1'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok", "two of content-length"),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", "the header b'no header'"),
        (b"HTTP/2 200 OK\r\n\r\n", "expected HTTP/1.1"),
        (b"SSH-2.0-x\r\n\r\n", "expected HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000, "more than 65536 bytes of headers"),
    ],
)
async def test_what_is_no_answer_is_said_to_be_none(answer: bytes, problem: str) -> None:
    server = Server(answer)
    async with server.serving(), asking(server) as client:
        with pytest.raises(httpx2.RemoteProtocolError, match=problem):
            await client.get("/")


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", OK[:-2], b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]),
)
async def test_junk_is_an_answer_or_an_error_of_httpx(junk: bytes, before: bytes) -> None:
    server = Server(before + junk)
    async with server.serving(), asking(server) as client:
        with contextlib.suppress(httpx2.TransportError):
            await client.get("/")


async def test_a_connection_serves_again_after_an_answer_that_was_read() -> None:
    server = Server(OK, OK, OK)
    async with server.serving(), asking(server) as client:
        for body in (b"one", b"two"):
            assert (await client.post("/x", content=body)).text == "ok"
        async with client.stream("GET", "/y") as answer:
            assert answer.status_code == 200
    assert [asked.partition(b" HTTP")[0] for asked in server.asked] == [b"POST /x", b"POST /x", b"GET /y"]
    assert [asked.rpartition(b"\r\n\r\n")[2] for asked in server.asked] == [b"one", b"two", b""]
    assert len(server.connections) == 1


async def test_a_connection_that_was_left_in_the_middle_serves_no_more() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", OK)
    async with server.serving(), asking(server) as client:
        async with client.stream("GET", "/"):
            pass
        server.answers = [OK]
        assert (await client.get("/")).text == "ok"
    assert len(server.connections) == 2


async def test_a_connection_that_its_server_ended_is_not_used_again() -> None:
    server = Server(OK, OK, OK)
    async with server.serving(), asking(server) as client:
        await client.get("/")
        server.connections[0].close()
        await server.connections[0].wait_closed()
        assert (await client.get("/")).text == "ok"
    assert len(server.connections) == 2


async def test_a_server_is_verified_and_large_bodies_come_through_tls(tmp_path: Path) -> None:
    pair = AUTHORITY.server("localhost", "localhost")
    (tmp_path / "pair").write_bytes(pair.certificate + pair.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "pair")
    trusting = ssl.create_default_context(cadata=AUTHORITY.credentials.certificate.decode())
    large = bytes(range(256)) * 4096
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(large), large), OK)
    async with server.serving(serving):
        async with asking(server, trusting) as client:
            assert (await client.put("/", content=large)).content == large
            assert (await client.get("/")).text == "ok"
        assert server.asked[0].endswith(large)
        assert len(server.connections) == 1
        async with asking(
            server, ssl.create_default_context(cadata=Authority("x").credentials.certificate.decode())
        ) as client:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/")


async def test_a_token_of_two_lines_is_no_second_header_and_is_not_told() -> None:
    server = Server(OK)
    async with server.serving(), asking(server) as client:
        with pytest.raises(httpx2.LocalProtocolError, match="header Authorization has a line break") as raised:
            await client.get("/", headers={"Authorization": "Bearer secret\r\nX-Other: y"})
    assert "secret" not in str(raised.value)


async def test_nobody_at_the_port_is_an_error_of_connecting() -> None:
    server = Server()
    async with server.serving():
        pass
    async with asking(server) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get("/")
