"""New connections of legitimate clients while others hold all connections of an HTTP server, in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from virtualtime import Threads, VirtualTimeLoop, controlled

from accelplane.http import progress, server
from accelplane.http.messages import HttpLimits, Response
from accelplane.http.server import HttpServer

LIMITS = HttpLimits(connections=8)
GET = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
PARTS = [b"", GET[:-1], b"POST /now HTTP/1.1\r\nContent-Length: 9\r\n\r\n1"]
ATTACKERS = 30

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextmanager
def virtual_time() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    try:
        with controlled(loop, Threads(), server, progress):
            yield loop
        assert loop.errors == []
    finally:
        loop.close()


@asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncGenerator[HttpServer]:
    http = HttpServer(lambda request: Response(200, request.path.encode()), limits)
    await http.start("127.0.0.1", 0)
    try:
        yield http
    finally:
        await http.stop(0.1)


async def connect(http: HttpServer, source: str = "127.0.0.1") -> Client:
    return await asyncio.open_connection("127.0.0.1", http.addresses[0][1], local_addr=(source, 0))


async def ask(client: Client) -> None:
    reader, writer = client
    writer.write(GET)
    assert await reader.readuntil(b"\r\n\r\n/now")


async def elapsed(work: Coroutine[object, object, None]) -> float:
    """Virtual seconds until `work` is done."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await work
    return loop.time() - start


async def review(http: HttpServer, source: str = "127.0.0.1") -> None:
    client = await connect(http, source)
    await ask(client)
    client[1].close()


@asynccontextmanager
async def run_attack(
    http: HttpServer,
    sent: bytes = b"",
    sources: Callable[[int], str] = lambda _number: "127.0.0.1",
    pause: float = 15,
    count: int = ATTACKERS,
) -> AsyncGenerator[None]:
    """Clients that send a part of a request and reconnect after a pause when they are disconnected."""

    async def attack(source: str) -> None:
        while True:
            reader, writer = await connect(http, source)
            writer.write(sent)
            try:
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
            finally:
                writer.transport.abort()
            await asyncio.sleep(pause)

    attackers = [asyncio.create_task(attack(sources(number))) for number in range(count)]
    try:
        yield
    finally:
        for each in attackers:
            each.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        await asyncio.sleep(0)


@pytest.mark.parametrize("sent", PARTS)
@pytest.mark.parametrize("sources", [lambda _: "127.0.0.1", lambda number: f"127.0.0.{10 + number % 20}"])
@pytest.mark.parametrize("pause", [0.1, 15])
def test_new_connections_are_served_during_an_attack(sent: bytes, sources: Callable[[int], str], pause: float) -> None:
    async def scenario() -> list[float]:
        async with serving() as http, run_attack(http, sent, sources, pause):
            await asyncio.sleep(6)
            found: list[float] = []
            for _ in range(8):
                found.append(await elapsed(review(http)))
                await asyncio.sleep(0.4)
            assert len(http.connections) <= LIMITS.connections
            return found

    with virtual_time() as loop:
        waits = loop.run(scenario())
    # A client that reconnects at once occupies the backlog: 60 connections in turns of 8, each for 50 ms.
    assert max(waits) <= (0.1 if pause == 15 else 0.5)


@pytest.mark.parametrize("sent", PARTS)
def test_an_attack_is_detected_while_its_connections_arrive(sent: bytes) -> None:
    """Each connection is silent for a different time, and the first ones may be closed before the last ones arrive."""

    async def attack(http: HttpServer, number: int) -> None:
        await asyncio.sleep(0.2 * number)
        async with run_attack(http, sent, count=1):
            await asyncio.sleep(60)

    async def scenario() -> list[float]:
        async with serving() as http:
            attackers = [asyncio.create_task(attack(http, number)) for number in range(2 * ATTACKERS)]
            await asyncio.sleep(5)
            found = [await elapsed(review(http)) for _ in range(20) if not await asyncio.sleep(0.4)]
            for each in attackers:
                each.cancel()
            await asyncio.gather(*attackers, return_exceptions=True)
            return found

    with virtual_time() as loop:
        assert max(loop.run(scenario())) <= 0.1


def test_the_first_review_of_an_attack_waits_until_it_is_detected() -> None:
    async def scenario() -> float:
        async with serving() as http, run_attack(http):
            await asyncio.sleep(0.01)
            return await elapsed(review(http))

    with virtual_time() as loop:
        assert loop.run(scenario()) <= LIMITS.attack_evidence + 0.15


def test_attackers_that_send_single_bytes_are_detected_by_their_silent_connections() -> None:
    async def send_slowly(http: HttpServer) -> None:
        """Sends bytes continuously without completing a request."""
        _, writer = await connect(http)
        try:
            while not writer.is_closing():
                writer.write(b"G")
                await asyncio.sleep(1)
        finally:
            writer.transport.abort()

    async def scenario() -> float:
        async with serving() as http:
            dripping = asyncio.create_task(send_slowly(http))
            await asyncio.sleep(0.1)
            async with run_attack(http):
                await asyncio.sleep(3)
                assert http.waiting
                await asyncio.sleep(9)
                wait = await elapsed(review(http))
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
            return wait

    with virtual_time() as loop:
        assert loop.run(scenario()) <= 0.2


def test_silent_clients_do_not_fill_the_accept_queue_during_an_attack() -> None:
    async def scenario() -> list[float]:
        limits = HttpLimits(connections=8, accept_queue=4)
        async with serving(limits) as http, run_attack(http, PARTS[1], count=10), run_attack(http, pause=1):
            await asyncio.sleep(4)
            return [await elapsed(review(http)) for _ in range(20) if not await asyncio.sleep(0.15)]

    with virtual_time() as loop:
        assert max(loop.run(scenario())) <= 0.2


def test_clients_beyond_the_accept_queue_wait_without_an_attack() -> None:
    async def scenario() -> None:
        async with serving(HttpLimits(connections=2, accept_queue=2)) as http:
            busy = [await connect(http) for _ in range(2)]
            others = [asyncio.create_task(review(http)) for _ in range(20)]
            await asyncio.sleep(0.3)
            assert (len(http.connections), http.waiting, http.accept_paused) == (2, 2, True)
            for each in busy:
                await ask(each)
                each[1].close()
            await asyncio.gather(*others)
            assert http.waiting == 0

    with virtual_time() as loop:
        loop.run(scenario())


def test_a_client_that_waits_too_long_without_data_is_closed() -> None:
    async def scenario() -> None:
        async with serving(HttpLimits(connections=1, request=3)) as http:
            busy = await connect(http)
            silent = await connect(http)
            for _ in range(20):
                await asyncio.sleep(0.4)
                await ask(busy)
            assert http.waiting == 0
            assert await silent[0].read() == b""
            for each in (busy, silent):
                each[1].close()

    with virtual_time() as loop:
        loop.run(scenario())


def test_kept_connections_survive_an_attack_on_new_ones() -> None:
    async def scenario() -> None:
        async with serving() as http:
            api_server = await connect(http)
            await ask(api_server)
            async with run_attack(http, pause=0.2):
                for _ in range(5):
                    await asyncio.sleep(2)
                    await ask(api_server)
            api_server[1].close()

    with virtual_time() as loop:
        loop.run(scenario())


def test_clients_that_stay_idle_after_a_request_are_replaced() -> None:
    async def scenario() -> float:
        async with serving() as http, run_attack(http, GET):
            await asyncio.sleep(12)
            return await elapsed(review(http, "127.0.0.2"))

    with virtual_time() as loop:
        assert loop.run(scenario()) <= 1


def test_an_address_with_few_connections_keeps_them_during_an_attack_of_another() -> None:
    async def scenario() -> None:
        async with serving() as http:
            async with run_attack(http, pause=0.2):
                await asyncio.sleep(6)
                slow = await connect(http, "127.0.0.2")
                slow[1].write(GET[:10])
                await asyncio.sleep(4.9)
                slow[1].write(GET[10:])
                assert await slow[0].readuntil(b"\r\n\r\n/now")
            slow[1].close()

    with virtual_time() as loop:
        loop.run(scenario())


def test_slow_clients_of_a_burst_are_not_closed(caplog: pytest.LogCaptureFixture) -> None:
    """An overloaded API server needs seconds between connect and request, but some of its connections continue."""

    async def slow_review(http: HttpServer, number: int) -> None:
        client = await connect(http)
        await asyncio.sleep(1 + number * 37 % 36 / 10)
        await ask(client)
        client[1].close()

    async def scenario() -> None:
        async with serving(HttpLimits()) as http, asyncio.TaskGroup() as tasks:
            for number in range(400):
                tasks.create_task(slow_review(http, number))

    with virtual_time() as loop:
        loop.run(scenario())
    assert "are silent" not in caplog.text


def test_an_attack_is_forgotten_after_it_has_ended() -> None:
    async def scenario() -> None:
        async with serving() as http:
            async with run_attack(http):
                await asyncio.sleep(20)
            await asyncio.sleep(31)
            slow = [await connect(http) for _ in range(LIMITS.connections)]
            waiting = asyncio.create_task(review(http))
            await asyncio.sleep(1.9)
            assert len(http.connections) == LIMITS.connections
            for each in slow:
                await ask(each)
                each[1].close()
            await waiting

    with virtual_time() as loop:
        loop.run(scenario())
