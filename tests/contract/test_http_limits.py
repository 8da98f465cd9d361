"""Limits of an HTTP server: its memory and the number of its connections."""

import asyncio
import contextlib
import os
import socket
import tracemalloc

import msgspec
import pytest
from httpservers import Pages, get, reply, serving
from waiting import until

from accelplane.http.messages import HttpLimits
from accelplane.http.server import HttpServer


async def test_request_heads_cannot_fill_the_memory() -> None:
    server = HttpServer(Pages())
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(300):
        writer.write(get("/now", field=f"X-Padding: {number:015000}\r\n"))
        assert (await reply(reader))[0] == 200
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    writer.close()
    await server.stop(0)
    assert grown < 500_000


async def test_credentials_are_not_cached_with_the_head() -> None:
    pages = Pages()
    pages.released.set()
    async with serving(pages) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path, field in (("/public", ""), ("/private", "Authorization: Bearer secret\r\n")):
            writer.write(get(path, field=field))
            assert (await reply(reader))[0] == 200
        assert [head.path for head in server.cached_heads.values()] == ["/public"]
        writer.close()


async def test_a_full_cache_of_heads_replaces_the_oldest() -> None:
    async with serving(Pages(), HttpLimits(cached_heads=2)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(3):
            writer.write(get("/now", field=f"X: {number}\r\n"))
            assert await reply(reader) == (200, "/now")
        assert len(server.cached_heads) == 2
        writer.close()


async def test_a_new_connection_replaces_the_longest_idle_connection() -> None:
    async with serving(Pages(), HttpLimits(connections=2, stall=0.05)) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(server.connections) == 2)
        # The first client is active after the second one, so the second one waits longest.
        clients[0][1].write(get("/now"))
        assert await reply(clients[0][0]) == (200, "/now")
        await asyncio.sleep(0.1)
        clients.append(await asyncio.open_connection("127.0.0.1", port))
        for reader, writer in (clients[0], clients[2]):
            writer.write(get("/now"))
            assert await reply(reader) == (200, "/now")
        with contextlib.suppress(ConnectionResetError):
            assert await clients[1][0].read() == b""
        assert len(server.connections) == 2
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("received", [b"", b"GET /now HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n1"])
async def test_connections_without_a_complete_request_do_not_block_new_ones(received: bytes) -> None:
    async with serving(Pages(), HttpLimits(connections=8, stall=0.05)) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in clients:
            writer.write(received)
        await until(lambda: len(server.connections) == 8)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now"))
        assert await reply(reader) == (200, "/now")
        for _, each in (*clients, (reader, writer)):
            each.close()


async def test_a_new_connection_waits_until_a_pending_response_is_sent() -> None:
    pages = Pages()
    async with serving(pages, HttpLimits(connections=1, stall=0)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        await until(lambda: pages.requests == ["/later"])
        other, another = await asyncio.open_connection("127.0.0.1", port)
        another.write(get("/now"))
        await until(lambda: server.waiting == 1)
        assert pages.requests == ["/later"]
        pages.released.set()
        assert await reply(reader) == (200, "/later ")
        assert await reader.read() == b"", "its slot is needed"
        assert await reply(other) == (200, "/now")
        writer.close()
        another.close()


async def test_a_burst_beyond_the_connection_limit_is_served_completely() -> None:
    async with serving(Pages(), HttpLimits(connections=4)) as (server, port):

        async def ask() -> tuple[int, str]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/now"))
            found = await reply(reader)
            writer.close()
            return found

        assert await asyncio.gather(*(ask() for _ in range(100))) == [(200, "/now")] * 100
        assert len(server.connections) <= 4


async def test_a_client_whose_data_is_not_read_yet_is_not_evicted() -> None:
    """A busy server must not close a connection because of its own delay."""
    async with serving(Pages(), HttpLimits(connections=2, stall=0.05)) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(server.connections) == 2)
        await asyncio.sleep(0.1)
        for _, writer in clients:
            sent = writer.get_extra_info("socket")
            os.write(sent.fileno(), get("/now"))
        newcomer = socket.create_connection(("127.0.0.1", port))
        server._accept(server._listening[0])  # pyright: ignore[reportPrivateUsage] - before the loop reads
        assert (len(server.connections), server.waiting) == (2, 1)
        for reader, _ in clients:
            assert await reply(reader) == (200, "/now")
        newcomer.close()
        for _, writer in clients:
            writer.close()


async def test_an_idle_client_is_evicted_before_one_that_has_sent_requests() -> None:
    async with serving(Pages(), HttpLimits(connections=2, stall=0.05)) as (_, port):
        served, silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        served[1].write(get("/now"))
        assert await reply(served[0]) == (200, "/now")
        await asyncio.sleep(0.1)
        silent[1].write(b"GET")  # its last progress is later
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now"))
        assert await reply(reader) == (200, "/now")
        assert (await reply(silent[0]))[0] == 503
        served[1].write(get("/now"))
        assert await reply(served[0]) == (200, "/now")
        for _, each in (served, silent, (reader, writer)):
            each.close()


def post(length: int, body: bytes = b"") -> bytes:
    return f"POST /now HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode() + body


# A request of 100,000 bytes reserves five times as much.
SMALL_MEMORY = HttpLimits(memory=800_000, body=200_000, connections=40, wait=0.3, linger=0.1)


async def test_large_requests_wait_for_memory_and_are_answered() -> None:
    async with serving(Pages(), msgspec.structs.replace(SMALL_MEMORY, wait=20)) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in clients:
            writer.write(post(100_000, b"x" * 50_000))
        await until(lambda: server.reserved == 500_000)
        for _, writer in clients:
            writer.write(b"x" * 50_000)
        for reader, writer in clients:
            assert await reply(reader) == (200, "/now")
            writer.close()
        assert server.reserved == 0


async def test_a_request_that_waits_too_long_for_memory_gets_503() -> None:
    async with serving(Pages(), msgspec.structs.replace(SMALL_MEMORY, stall=60)) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in clients:
            writer.write(post(100_000, b"x" * 50_000))
            await asyncio.sleep(0.05)
        assert (await reply(clients[1][0]))[0] == 503
        assert await clients[1][0].read() == b""
        clients[1][1].close()
        clients[0][1].write(b"x" * 50_000)
        assert await reply(clients[0][0]) == (200, "/now")
        clients[0][1].close()
        await until(lambda: not server.connections)
        assert server.reserved == 0


async def test_the_memory_of_a_stalled_body_is_released_for_another_request() -> None:
    limits = msgspec.structs.replace(SMALL_MEMORY, wait=20, stall=0.1)
    async with serving(Pages(), limits) as (_, port):
        stalled = await asyncio.open_connection("127.0.0.1", port)
        stalled[1].write(post(100_000, b"x" * 1000))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(100_000, b"x" * 100_000))
        assert (await reply(stalled[0]))[0] == 503
        assert await reply(reader) == (200, "/now")
        for _, each in (stalled, (reader, writer)):
            each.close()


async def test_small_requests_do_not_wait_behind_large_ones() -> None:
    limits = msgspec.structs.replace(SMALL_MEMORY, wait=20, stall=60)
    async with serving(Pages(), limits) as (_, port):
        large = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in large:
            writer.write(post(100_000, b"x" * 1000))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(10_000, b"x" * 5_000))
        await asyncio.sleep(0.05)
        writer.write(b"x" * 5_000)
        assert await reply(reader) == (200, "/now")
        for _, each in (*large, (reader, writer)):
            each.close()


async def test_memory_of_failed_requests_is_released() -> None:
    """Otherwise the server would answer 503 permanently."""
    limits = HttpLimits(memory=400_000, body=200_000, request=0.2, linger=0.02, stall=0.05)
    async with serving(Pages(), limits) as (server, port):
        for number in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((post(50_000, b"x" * 40_000), b"x" * 17_000, post(9_999_999_999))[number % 3])
            if number % 2:
                writer.transport.abort()
            else:
                assert (await reply(reader))[0] in (408, 413, 431)
                writer.close()
        await until(lambda: not server.connections)
        assert (server.reserved, server.buffered) == (0, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(60_000, b"x" * 60_000))
        assert await reply(reader) == (200, "/now")
        writer.close()
