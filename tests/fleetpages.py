"""A client for the fleet page, and a double of the API server's reviews."""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from waiting import until

from accelplane.apiserver import ClientConfig
from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, Request, Response
from accelplane.http.server import HttpServer
from accelplane.kube.client import Client


class Answer(NamedTuple):
    """A response; the names of fields are in lower case."""

    status: int
    fields: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Caller:
    """Sends requests to a port, one connection each."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, **fields: str) -> None:
        self.port = port
        self._context = context
        self._fields = {"host": f"127.0.0.1:{port}", **fields}

    async def get(self, path: str, **fields: str) -> Answer:
        return await self.send("GET", path, **fields)

    async def send(self, method: str, path: str, body: bytes = b"", **fields: str) -> Answer:
        reader, writer = await self.open(method, path, body, **fields)
        try:
            async with asyncio.timeout(60):
                status, found = await head_of(reader)
                length = int(found.get("content-length", "0"))
                return Answer(status, found, b"" if method == "HEAD" else await reader.readexactly(length))
        finally:
            await _closed(writer)

    async def open(
        self, method: str, path: str, body: bytes = b"", **fields: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._context, limit=2**22)
        sent = {name.replace("_", "-"): value for name, value in {**self._fields, **fields}.items()}
        if method == "POST":
            sent["content-length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        return reader, writer

    @asynccontextmanager
    async def events(self, query: str, **fields: str) -> AsyncIterator["Events"]:
        """An open event stream."""
        reader, writer = await self.open("GET", f"/api/v1/events?{query}", **fields)
        try:
            async with asyncio.timeout(60):
                status, found = await head_of(reader)
            yield Events(status, found, reader)
        finally:
            await _closed(writer)


class Event(NamedTuple):
    """An event; a comment has the kind `comment`."""

    kind: str
    id: str
    data: Any


class Events:
    def __init__(self, status: int, fields: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.fields = fields
        self._reader = reader

    async def next(self) -> Event:
        """The next event. Raises `IncompleteReadError` at the end."""
        async with asyncio.timeout(60):
            while True:
                text = (await self._reader.readuntil(b"\n\n")).decode()
                if text.startswith(":"):
                    return Event("comment", "", text)
                lines = dict(line.split(": ", 1) for line in text.strip().splitlines())
                if "event" in lines:
                    return Event(lines["event"], lines.get("id", ""), msgspec.json.decode(lines["data"]))

    async def of_kind(self, kind: str) -> Event:
        while True:
            found = await self.next()
            if found.kind == kind:
                return found


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection. With TLS, `close` alone needs more than the end of a test leaves it."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}


def web_token(claims: Mapping[str, object]) -> str:
    """A token of the form that Kubernetes issues, with a signature that nobody verifies here."""
    return f"h.{base64.urlsafe_b64encode(msgspec.json.encode(claims)).decode().rstrip('=')}.s"


Rights = Callable[[str, str], bool]


class Reviews:
    """The reviews of an API server: `users` by token, `rights` by user and request.

    The tokens in `own` are valid for the audience of the API server only, other ones for all audiences. Reviews of
    tokens wait while `block` returns True; `blocked` is their number.
    """

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        self.own: set[str] = set()
        self.rights: set[tuple[str, str]] = set()
        self.fails = False
        self.block: Callable[[str], bool] = lambda _token: False
        self.blocked = 0
        self.reviewed: list[str] = []
        self.port = 0

    def __call__(self, request: Request) -> Response | PendingResponse:
        spec = msgspec.json.decode(request.body)["spec"]
        return self._wait(request) if self.block(spec.get("token", "")) else self._answer(request)

    async def _wait(self, request: Request) -> Response:
        self.blocked += 1
        token = msgspec.json.decode(request.body)["spec"]["token"]
        await until(lambda: not self.block(token), 60)
        self.blocked -= 1
        return self._answer(request)

    def _answer(self, request: Request) -> Response:
        if self.fails:
            raise HttpError(503, "down")
        spec = msgspec.json.decode(request.body)["spec"]
        if request.path.endswith("/tokenreviews"):
            self.reviewed.append(f"token {','.join(spec.get('audiences', ()))}")
            valid = not spec.get("audiences") or spec["token"] not in self.own
            user = self.users.get(spec["token"]) if valid else None
            status: dict[str, Any] = {"authenticated": user is not None}
            if user is not None:
                status |= {"user": {"username": user, "groups": ["g"]}, "audiences": spec.get("audiences")}
        else:
            access = spec.get("nonResourceAttributes") or spec["resourceAttributes"]
            where = access.get("path") or f"{access['resource']} {access.get('namespace', '')}".strip()
            operation = f"{access['verb']} {where}"
            self.reviewed.append(f"{spec['user']} {operation}")
            status = {"allowed": (spec["user"], operation) in self.rights}
        return Response(201, msgspec.json.encode({"metadata": {}, "spec": {}, "status": status}))

    def allow(self, user: str, *rights: str) -> None:
        self.rights |= {(user, each) for each in rights}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Client]:
        """A client of this server."""
        server = HttpServer(self)
        port = await server.start("127.0.0.1", 0)
        client = Client(ClientConfig(server=f"http://127.0.0.1:{port}"), field_manager="test", timeout=2)
        try:
            yield client
        finally:
            await client.close()
            await server.stop(0.1)
