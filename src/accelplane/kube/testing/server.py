"""`FakeApiServer`: an HTTP server on a port of the loopback interface with the API of Kubernetes."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from accelplane.apiserver import ClientConfig

from .documents import JsonObject
from .faults import Fault, RecordedRequest
from .handlers import Failure, Handlers, Resource, encode, partial_metadata
from .selectors import matches
from .storage import Change, Storage

_HANG = 3600.0
_MAX_HEAD = 1 << 20
_ROUNDING = 0.001


class FakeApiServer(Storage):
    """An API server in memory, for tests of controllers.

        async with FakeApiServer() as server:
            client = Client(server.config, field_manager="test")

    `requests` has all requests, `objects` all objects. `admit` changes each object that is written, as a mutating
    webhook does. `bookmark_interval` are the seconds between bookmarks of a watch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[RecordedRequest] = []
        self.faults: list[Fault] = []
        self.admit: Callable[[JsonObject], JsonObject] = lambda thing: thing
        self.bookmark_interval = 60.0
        # With this, watches stay open and send nothing.
        self.silent = False
        self.url = ""
        self._handlers = Handlers(self, lambda thing: self.admit(thing))  # noqa: PLW0108 - a test sets `admit` later
        self._connections: set[asyncio.Task[None]] = set()
        self._watchers: dict[asyncio.StreamWriter, str] = {}
        self._muted: set[asyncio.StreamWriter] = set()
        self._watch_delays: dict[str, float] = {}
        self._server: asyncio.Server | None = None
        self._port: int = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def config(self) -> ClientConfig:
        """The configuration of a `Client` for this server."""
        return ClientConfig(server=self.url)

    @property
    def address(self) -> str:
        """`host:port`."""
        return self.url.removeprefix("http://")

    async def start(self) -> None:
        """Listens. After `stop`, listens at the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=_MAX_HEAD)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Stops listening and aborts all connections."""
        if self._server:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def count(self, pattern: str) -> int:
        """The number of received requests whose text (`GET /api/v1/…`, `WATCH /api/…`) matches."""
        return sum(1 for request in self.requests if re.search(pattern, str(request)))

    # Faults

    def fault(self, pattern: str, status: int = 0, **options: Any) -> Fault:
        """Adds a `Fault`, with the options of its constructor. The first fault that matches a request applies."""
        self.faults.append(created_fault := Fault(pattern, status, **options))
        return created_fault

    @property
    def open_watches(self) -> int:
        return len(self._watchers)

    def abort_watches(self) -> None:
        """Resets the connections of all watches."""
        for writer in self._watchers:
            writer.transport.abort()

    def end_watches(self, rest: bytes = b"") -> None:
        """Ends all watches as a server does at their time-out, after these last bytes."""
        for writer in self._watchers:
            writer.write((_chunk(rest) if rest else b"") + b"0\r\n\r\n")
            writer.close()

    def pause_watches(self, pattern: str = "") -> None:
        """Sends nothing more to the watches that are open now and whose path matches."""
        self._muted |= {writer for writer, path in self._watchers.items() if re.search(pattern, path)}

    def delay_watches(self, pattern: str, seconds: float) -> None:
        """Sends changes this much later to watches whose path matches, also to those that begin later."""
        self._watch_delays[pattern] = seconds

    def send(self, line: bytes) -> None:
        """Sends a line of any content to all watches."""
        for writer in self._watchers:
            writer.write(_chunk(line + b"\n"))

    # HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task  # noqa: S101 - asyncio runs this function in a task
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError):
                while await self._serve_one(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._watchers.pop(writer, None)
            self._muted.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request. Returns whether the connection can be used again."""
        request = await _read(reader)
        self.requests.append(request)
        fault = next((one for one in self.faults if one.hits(request)), None)
        if fault is not None:
            return await self._fail(fault, request, writer)
        try:
            if request.watch:
                await self._watch(request, writer)
            else:
                code, body = self._handlers.handle(request)
                _write(writer, code, encode(body))
        except Failure as failure:
            _write(writer, failure.code, encode(failure.status()))
        return True

    async def _fail(self, fault: Fault, request: RecordedRequest, writer: asyncio.StreamWriter) -> bool:
        if fault.after:
            with contextlib.suppress(Failure):
                self._handlers.handle(request)
        fault.then()
        if fault.hang:
            await asyncio.sleep(_HANG)
        if not fault.status:
            writer.transport.abort()
            return False
        body = encode(Failure(fault.status, "injected fault").status()) if fault.body is None else fault.body
        _write(writer, fault.status, body, fault.headers)
        return True

    # Watches

    async def _watch(self, request: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        """Raises `Failure` before the watch has begun."""
        resource = Resource.of(request.path)
        initial = self._handlers.select(resource, request)
        version = request.parameters.get("resourceVersion") or "0"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        if version == "0":
            version = str(self.version)
            for thing in initial:
                _write_event(writer, "ADDED", partial_metadata(thing, request.accept))
        elif int(version) < self.oldest:
            _write_event(writer, "ERROR", Failure(410, f"too old resource version: {version} ({self.oldest})").status())
            writer.write(b"0\r\n\r\n")
            return
        self._watchers[writer] = request.path
        await self._follow(resource, request, int(version), writer)
        self._watchers.pop(writer, None)
        writer.write(b"0\r\n\r\n")

    async def _follow(
        self, resource: Resource, request: RecordedRequest, version: int, writer: asyncio.StreamWriter
    ) -> None:
        """Sends changes and bookmarks until the time-out of the watch."""
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.parameters.get("timeoutSeconds", "1800"))
        # A timer may be early by the rounding of a sum.
        while end - loop.time() > _ROUNDING and not writer.transport.is_closing():
            changed, changes = self.change_of(resource.plural), self.since(version)
            if changes and (delay := self._watch_delay(request.path)):
                await asyncio.sleep(delay)
            for change in changes:
                version = change.version
                event = _event(change, resource, request)
                if event is not None and not self._is_silent(writer):
                    _write_event(writer, *event)
            await writer.drain()
            try:
                async with asyncio.timeout(min(self.bookmark_interval, max(0.0, end - loop.time()))):
                    await changed.wait()
            except TimeoutError:
                if request.parameters.get("allowWatchBookmarks") == "true" and not self._is_silent(writer):
                    metadata = {"resourceVersion": str(self.version)}
                    _write_event(writer, "BOOKMARK", {"kind": "Bookmark", "apiVersion": "v1", "metadata": metadata})

    def _watch_delay(self, path: str) -> float:
        return max((delay for pattern, delay in self._watch_delays.items() if re.search(pattern, path)), default=0.0)

    def _is_silent(self, writer: asyncio.StreamWriter) -> bool:
        return self.silent or writer in self._muted


def _event(change: Change, resource: Resource, request: RecordedRequest) -> tuple[str, JsonObject] | None:
    """The watch event of a change. An object that is no longer selected is sent as deleted."""

    def selected(thing: JsonObject | None) -> bool:
        return (
            thing is not None
            and resource.namespace in {"", thing["metadata"].get("namespace", "")}
            and matches(thing, request.parameters)
        )

    if change.plural != resource.plural or not (selected(change.old) or selected(change.new)):
        return None
    if selected(change.new):
        thing, kind = change.new, "MODIFIED" if selected(change.old) else "ADDED"
    else:
        thing, kind = change.new or change.old, "DELETED"
    assert thing is not None  # noqa: S101 - one of both is selected
    sent = {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(change.version)}}
    return kind, partial_metadata(sent, request.accept)


async def _read(reader: asyncio.StreamReader) -> RecordedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, target, _ = first.split(" ")
    url = urlsplit(target)
    return RecordedRequest(
        method,
        unquote(url.path),
        {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
        headers.get("content-type", ""),
        json.loads(body) if body else None,
        headers.get("accept", ""),
    )


def _write(writer: asyncio.StreamWriter, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    lines = [f"HTTP/1.1 {code} Status", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def _write_event(writer: asyncio.StreamWriter, kind: str, thing: JsonObject) -> None:
    writer.write(_chunk(encode({"type": kind, "object": thing}) + b"\n"))


def _chunk(text: bytes) -> bytes:
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"
