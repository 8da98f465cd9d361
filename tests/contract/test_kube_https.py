"""HTTP servers whose answers have to be awaited, and that look whether they can be reached."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from cluster.pki import Authority
from waiting import until

from accelplane.kube.http1 import Answer, HttpError, HttpLimits, Request
from accelplane.kube.https import Answering, HttpServer
from accelplane.kube.tls import ServingTls

SERVER = Authority("tests").server("localhost", "localhost")


class Oracle:
    """Answers `/now` at once, `/later` when it is told to, and what it was asked in the meantime."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.left = 0

    def __call__(self, request: Request) -> Answer | Answering:
        self.asked.append(request.path)
        return Answer(200, request.path.encode()) if request.path == "/now" else self.later(request)

    async def later(self, request: Request) -> Answer:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if request.path == "/refused":
            raise HttpError(403, "not for you")
        if request.path == "/fault":
            raise ValueError("a fault")
        return Answer(200, f"{request.path} {request.authorization}".encode())


@contextlib.asynccontextmanager
async def serving(oracle: Oracle, limits: HttpLimits | None = None) -> AsyncGenerator[tuple[HttpServer, int]]:
    server = HttpServer(oracle, limits)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop(0.1)


def get(*paths: str, field: str = "") -> bytes:
    return b"".join(f"GET {path} HTTP/1.1\r\nHost: x\r\n{field}\r\n".encode() for path in paths)


async def reply(reader: asyncio.StreamReader) -> tuple[int, str]:
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
        return int(head.split(" ")[1]), (await reader.readexactly(length)).decode()


async def test_who_has_to_wait_holds_up_nobody_else_and_all_get_their_answers_in_order() -> None:
    oracle = Oracle()
    async with serving(oracle) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now", "/later", "/now", "/later"))
        assert await reply(reader) == (200, "/now")
        other, another = await asyncio.open_connection("127.0.0.1", port)
        another.write(get("/now"))
        assert await reply(other) == (200, "/now")
        assert oracle.asked == ["/now", "/later", "/now"]
        oracle.go.set()
        assert [await reply(reader) for _ in range(3)] == [(200, "/later "), (200, "/now"), (200, "/later ")]
        writer.write(get("/later", field="Authorization: Bearer x\r\n"))
        assert await reply(reader) == (200, "/later Bearer x")
        writer.close()
        another.close()


@pytest.mark.parametrize(("path", "status"), [("/refused", 403), ("/fault", 500)])
async def test_what_comes_of_waiting_may_be_a_refusal(path: str, status: int) -> None:
    oracle = Oracle()
    oracle.go.set()
    async with serving(oracle) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(path))
        found, text = await reply(reader)
        assert (found, "fault" in text) == (status, False)
        writer.close()


async def test_nobody_goes_on_with_an_answer_for_a_caller_who_has_left() -> None:
    oracle = Oracle()
    async with serving(oracle, HttpLimits(request=0.3)) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        await until(lambda: oracle.asked == ["/later"])
        writer.transport.abort()
        await until(lambda: oracle.left == 1 and not server.connections)


async def test_an_answer_may_be_given_up_before_anybody_began_with_it() -> None:
    oracle = Oracle()
    server = HttpServer(oracle)
    port = await server.start("127.0.0.1", 0)

    def ask(request: Request) -> Answering:
        for connection in list(server.connections):
            asyncio.get_running_loop().call_soon(connection.abort)
        return oracle.later(request)

    server.handler = ask
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/later"))
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await server.stop()
    assert oracle.left == 0, "it was begun"


async def test_who_waits_too_long_is_told_so() -> None:
    oracle = Oracle()
    async with serving(oracle, HttpLimits(request=0.2, linger=0.1)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/later"))
        assert await reply(reader) == (503, "no answer within 0.2 s\n")
        assert oracle.left == 1
        assert await reader.read() == b""
        writer.close()


async def test_a_server_that_ends_gives_the_answers_that_are_awaited() -> None:
    oracle = Oracle()
    server = HttpServer(oracle)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/later"))
    await until(lambda: oracle.asked == ["/later"])
    ending = asyncio.create_task(server.stop(10))
    await asyncio.sleep(0)
    oracle.go.set()
    assert await reply(reader) == (200, "/later ")
    assert await reader.read() == b""
    writer.close()
    await ending


async def test_two_words_on_who_one_is_are_refused() -> None:
    oracle = Oracle()
    async with serving(oracle) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/now", field="Authorization: Bearer x\r\nauthorization: Bearer y\r\n"))
        assert (await reply(reader))[0] == 400
        writer.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
async def test_a_server_knows_whether_it_can_be_reached(host: str | None) -> None:
    tls = ServingTls()
    server, plain = HttpServer(Oracle()), HttpServer(Oracle())
    assert not await server.accepts()
    await server.start(host, 0, tls.context)
    await plain.start(host, 0)
    assert not await server.accepts(), "there is no certificate yet"
    tls.use(SERVER.certificate, SERVER.key)
    assert await server.accepts()
    assert await plain.accepts()
    await until(lambda: not server.connections)
    await server.stop()
    await plain.stop()
    assert not await server.accepts()


async def test_a_server_with_no_room_for_one_more_cannot_be_reached() -> None:
    tls = ServingTls()
    tls.use(SERVER.certificate, SERVER.key)
    server = HttpServer(Oracle(), HttpLimits(connections=0))
    await server.start("127.0.0.1", 0, tls.context)
    assert not await server.accepts()
    await server.stop()
