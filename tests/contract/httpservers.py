"""Pages of an HTTP server, and requests to them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.server import HttpServer


class Pages:
    """A handler: `/now` is answered immediately, other paths when `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.requests: list[str] = []
        self.cancelled = 0

    def __call__(self, request: Request) -> Response | PendingResponse:
        self.requests.append(request.path)
        return Response(200, request.path.encode()) if request.path == "/now" else self.later(request)

    async def later(self, request: Request) -> Response:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if request.path == "/refused":
            raise HttpError(403, "not for you")
        if request.path == "/fault":
            raise ValueError("a fault")
        return Response(200, f"{request.path} {request.authorization}".encode())


@contextlib.asynccontextmanager
async def serving(pages: Pages, limits: HttpLimits | None = None) -> AsyncGenerator[tuple[HttpServer, int]]:
    server = HttpServer(pages, limits)
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
