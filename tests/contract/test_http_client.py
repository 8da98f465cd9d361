"""The HTTP client with valid, invalid, slow and hostile servers, over plain sockets and TLS."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from httppeers import OK, Server, connected, fetch
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from accelplane.http.client import HttpClient, HttpClientError, ProtocolError
from accelplane.http.stream import ConnectionLost


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
        # An expression for the blanks would try all ways to divide them.
        (b"HTTP/1.1 200 OK\r\nA:" + b" " * 60_000 + b"\x00\r\n\r\n", "the header field"),
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


@pytest.mark.parametrize("target", ["", "/a b", "/a\r\nX: y", "/\u00e9"])
async def test_a_target_that_is_more_than_a_target_is_rejected(target: str) -> None:
    server = Server(OK)
    async with server.serving(), connected(server) as client:
        with pytest.raises(ProtocolError, match="request target"):
            await fetch(client, "GET", target)
