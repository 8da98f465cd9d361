"""HTTP/1.1 for callers that nobody chose: a small part of RFC 9112, read strictly, within limits of size and time.

A request is a `POST` with a body of known length or a `GET`; whatever else HTTP can do is refused with a word on why.
Callers are the API server, probes, and anybody who can reach the port. docs/decisions/0013-admission-over-own-http.md tells why.
"""

import asyncio
import contextlib
import functools
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from msgspec import Struct

log = logging.getLogger(__name__)

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
_LENGTH = re.compile(rb"[0-9]{1,10}")
_END = b"\r\n\r\n"
_HEADS = 256


class HttpLimits(Struct, frozen=True, kw_only=True):
    """What a caller may cost. Sizes are bytes, times seconds."""

    body: int = 3 * 1024 * 1024  # what the API server itself takes at most
    head: int = 16 * 1024
    fields: int = 64
    connections: int = 512
    unfinished: int = 32 * 1024 * 1024  # of all connections together
    handshake: float = 10
    request: float = 15  # a whole one, from its first byte; also for taking the answer
    idle: float = 180  # longer than the API server keeps one, so it is never the server who closes under a request
    linger: float = 1  # for a caller who is still talking to hear a refusal


class Request(Struct, frozen=True):
    """A request; `path` is without its query."""

    method: str
    path: str
    content_type: str
    body: bytes


class Answer(Struct, frozen=True):
    """What the caller gets."""

    status: int
    body: bytes
    content_type: str = "application/json"


class HttpError(Exception):
    """A request that is refused; the text is for the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Request], Answer]


class HttpServer:
    """Answers requests at an address with what `handler` says. It may raise `HttpError`; all else is a 500."""

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self.handler = handler
        self.limits = limits or HttpLimits()
        self.connections: set[_Connection] = set()
        self.unfinished = 0
        self.ending = False
        # Heads of one caller differ in their length at most; a review takes little longer than reading one anew.
        self.read_head = functools.lru_cache(_HEADS)(functools.partial(_read_head, limits=self.limits))
        self._server: asyncio.Server | None = None
        self._empty = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        times = (self.limits.request, self.limits.idle, self.limits.handshake)
        self._interval = min(5.0, min(times) / 2)

    async def start(self, host: str | None, port: int, context: ssl.SSLContext | None = None) -> int:
        """Serves, over TLS with a context. Returns the port, which the kernel chose if it was 0. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        patience = None if context is None else self.limits.handshake
        listening = _listening(host, port)
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self), sock=listening, ssl=context, backlog=1024, ssl_handshake_timeout=patience
            )
        except BaseException:
            listening.close()
            raise
        return int(listening.getsockname()[1])

    async def stop(self, grace: float = 5.0) -> None:
        """Takes no more connections, lets requests that have begun end within `grace`, and closes."""
        self.ending = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.end_when_idle()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def admit(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if self.ending or len(self.connections) >= self.limits.connections:
            return False
        self.connections.add(connection)
        self._empty.clear()
        if self._sweeper is None:
            self._sweep()
        return True

    def forget(self, connection: "_Connection") -> None:
        """It is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _sweep(self) -> None:
        """Ends those who are late. One timer for all, and none while nobody is connected."""
        now = time.monotonic()
        for connection in [one for one in self.connections if one.deadline < now]:
            connection.late()
        self._sweeper = asyncio.get_running_loop().call_later(self._interval, self._sweep) if self.connections else None


def _listening(host: str | None, port: int) -> socket.socket:
    """A socket at an address, or at all of them: one for both families, so that there is one port. Raises `OSError`."""
    if host:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), port), family=family)
    if socket.has_dualstack_ipv6():
        # A kernel may know of IPv6 and be told not to use it.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class _Connection(asyncio.Protocol):
    """One caller: requests come in, answers go out, one after the other."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._head: _Head | None = None
        self._counted = 0
        self._stuck = False
        self._deaf = False
        self.deadline = time.monotonic() + self._limits.idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport) or not self._server.admit(self):
            transport.close()
            self._deaf = True
            return
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._count(0)
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not self._received and self._head is None:
            self.deadline = time.monotonic() + self._limits.request
        self._received += data
        self._work()

    def pause_writing(self) -> None:
        self._stuck = True
        self.deadline = time.monotonic() + self._limits.request
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stuck = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._work()

    def late(self) -> None:
        """Ends a connection whose time is up."""
        if self._deaf or self._stuck or not (self._received or self._head):
            self.abort()
        else:
            self._refuse(HttpError(408, f"no complete request within {self._limits.request:g} s"))

    def end_when_idle(self) -> None:
        """Closes now, or behind the answer to a request that has begun."""
        if not self._deaf and not self._received and self._head is None and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._deaf = True
        if self._transport is not None:
            self._transport.abort()

    def _work(self) -> None:
        """Answers every request that is complete."""
        try:
            while not self._deaf and not self._stuck and (request := self._next()) is not None:
                keep = self._head is not None and self._head.keep and not self._server.ending
                self._head = None
                self._send(_answer(self._server.handler, request), keep=keep)
                idle = self._limits.request if self._received else self._limits.idle
                self.deadline = time.monotonic() + idle
            self._count(len(self._received))
        except HttpError as error:
            self._refuse(error)

    def _next(self) -> Request | None:
        """The next request, None while it is not complete. Raises `HttpError`."""
        if self._head is None:
            end = self._received.find(_END, 0, self._limits.head + len(_END))
            if end < 0:
                if len(self._received) > self._limits.head:
                    raise HttpError(431, f"expected a head of at most {self._limits.head} bytes")
                return None
            head = self._server.read_head(bytes(self._received[:end]))
            if head.expects and len(self._received) < end + len(_END) + head.length and self._transport:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            del self._received[: end + len(_END)]
            self._head = head
        if len(self._received) < self._head.length:
            return None
        body = bytes(self._received[: self._head.length])
        del self._received[: self._head.length]
        return Request(self._head.method, self._head.path, self._head.content_type, body)

    def _count(self, held: int) -> None:
        """Keeps the account of what all callers together make us hold. Raises `HttpError`."""
        self._server.unfinished += held - self._counted
        self._counted = held
        if held and self._server.unfinished > self._limits.unfinished:
            raise HttpError(503, "too many large requests at once")

    def _refuse(self, error: HttpError) -> None:
        """Answers with the error and listens no more, but stays a moment: a closed socket would eat the answer."""
        self._send(Answer(error.status, f"{error}\n".encode(), "text/plain; charset=utf-8"), keep=False, linger=True)

    def _send(self, answer: Answer, *, keep: bool, linger: bool = False) -> None:
        if self._transport is None:
            return
        phrase = HTTPStatus(answer.status).phrase
        end = "" if keep else "Connection: close\r\n"
        head = (
            f"HTTP/1.1 {answer.status} {phrase}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n{end}\r\n"
        )
        self._transport.write(head.encode("ascii") + answer.body)
        if keep:
            return
        self._deaf = True
        self._received.clear()
        self._count(0)
        if linger:
            self.deadline = time.monotonic() + self._limits.linger
            asyncio.get_running_loop().call_later(self._limits.linger, self._transport.close)
        else:
            self._transport.close()


class _Head(Struct, frozen=True):
    method: str
    path: str
    length: int
    content_type: str
    keep: bool
    expects: bool


def _answer(handler: Handler, request: Request) -> Answer:
    """Raises `HttpError`."""
    try:
        return handler(request)
    except HttpError:
        raise
    except Exception:
        log.exception("%s %s: this is a fault of ours", request.method, request.path)
        raise HttpError(500, "an internal error; the log tells more") from None


def _read_head(text: bytes, limits: HttpLimits) -> _Head:
    """Raises `HttpError`."""
    first, *lines = text.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        raise HttpError(400, "expected a request line of HTTP/1.1 with a path")
    if len(lines) > limits.fields:
        raise HttpError(431, f"expected at most {limits.fields} header fields")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise HttpError(400, "expected header fields as name: value")
        name = field[1].lower()
        if name in fields and name in (b"content-length", b"transfer-encoding", b"content-type", b"host"):
            raise HttpError(400, f"expected one {name.decode()}")
        fields[name] = field[2].rstrip()
    method = found[1].decode()
    connection = [each.strip().lower() for each in fields.get(b"connection", b"").split(b",")]
    return _Head(
        method=method,
        path=found[2].partition(b"?")[0].decode(),
        length=_length(method, fields, limits),
        content_type=fields.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1"),
        # HTTP/1.0 would have to ask for it, and nobody who matters speaks that.
        keep=found[3] == b"1" and b"close" not in connection,
        expects=fields.get(b"expect", b"").lower() == b"100-continue",
    )


def _length(method: str, fields: Mapping[bytes, bytes], limits: HttpLimits) -> int:
    """Raises `HttpError`."""
    if method not in ("POST", "GET"):
        raise HttpError(405, "expected POST, or GET for pages")
    if b"transfer-encoding" in fields:
        raise HttpError(411, "expected a body with a content-length")
    text = fields.get(b"content-length")
    if text is None:
        if method == "POST":
            raise HttpError(411, "expected a body with a content-length")
        return 0
    if not _LENGTH.fullmatch(text):
        raise HttpError(400, "expected a content-length that is a number")
    if int(text) > limits.body:
        raise HttpError(413, f"expected a body of at most {limits.body} bytes")
    return int(text)
