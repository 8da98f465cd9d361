"""A server of raw responses, and requests to it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

from accelplane.http.client import HttpClient

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
