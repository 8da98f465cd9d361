"""An HTTP/1.1 client for one server: pooled connections, TLS, strict framing within limits.

Deadlines belong to the caller (`asyncio.timeout`): every request and every read can be cancelled, which closes its
connection. Redirects are not followed.

Facts: RFC 9112 (message framing), RFC 9110 (1xx, 204 and 304 have no body, CONNECT).
"""

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from accelplane.http.stream import ConnectError, ConnectionLost, HttpClientError, Stream, cause_of, open_socket

_MAX_HEAD = 64 * 1024
_MAX_FIELDS = 100
_MAX_LINE = 1024
_MAX_INTERIM = 8

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
# Without the blanks around the value: a server could make an expression for them try all ways to divide them.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00\r\n]*)")
_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_TARGET = re.compile(r"[\x21-\x7e]+")
_NOT_IN_FIELDS = re.compile(r"[^\x20-\x7e]")


class ProtocolError(HttpClientError):
    """A response that violates HTTP/1.1 or exceeds a limit, or a request that cannot be serialized."""


class Proxy(msgspec.Struct, frozen=True):
    """A proxy that is reached by HTTP and tunnels by CONNECT; `authorization` is its credentials' header."""

    host: str
    port: int
    authorization: str = ""


class HttpClient:
    """Sends requests to one server, verified by the current `context`; without one, over plain TCP.

    An unused connection is kept for `idle_timeout` seconds; with 0, each request has a separate connection. A
    connection is not used for another request after `context` has returned another object.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        server_name: str = "",
        proxy: Proxy | None = None,
        idle_timeout: float = 15.0,
    ) -> None:
        self._host = host
        self._port = port
        self._context = context
        self._server_name = server_name or host
        self._proxy = proxy
        self._idle_timeout = idle_timeout
        self._idle: list[Stream] = []
        self._closed = False

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        target: str,
        fields: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        *,
        before_send: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator["Response"]:
        """The response. Its body must be read inside the context. Raises `HttpClientError`.

        `before_send` is called when a connection is available; the request is not sent if it raises.
        """
        closes = () if self._idle_timeout else (("Connection", "close"),)
        message = _serialize(method, target, (("Host", self.authority), *closes, *fields), body)
        response = await self._exchange(method, message, before_send)
        try:
            yield response
        finally:
            self._release(response)

    @property
    def authority(self) -> str:
        """`host:port` as in a URL."""
        return _authority(self._host, self._port)

    def close(self) -> None:
        """Closes the idle connections; requests that are in progress close theirs."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, method: str, message: bytes, before_send: Callable[[], None]) -> "Response":
        context = self._context() if self._context is not None else None
        while (connection := self._take(context)) is not None:
            try:
                return await _send(connection, message, before_send)
            except ConnectionLost:
                # The server may close an idle connection at the moment when a request is sent.
                if method != "GET" or connection.has_received:
                    raise
        connection = await self._connect(context)
        return await _send(connection, message, before_send)

    def _take(self, context: ssl.SSLContext | None) -> "Stream | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.context is context and connection.is_idle():
                return connection
            connection.close()
        return None

    def _release(self, response: "Response") -> None:
        connection = response.connection
        if not response.reusable or not self._idle_timeout or self._closed:
            connection.close()
            return
        connection.has_received = False
        connection.expiry = asyncio.get_running_loop().call_later(self._idle_timeout, self._expire, connection)
        self._idle.append(connection)

    def _expire(self, connection: "Stream") -> None:
        if connection in self._idle:
            self._idle.remove(connection)
            connection.close()

    async def _connect(self, context: ssl.SSLContext | None) -> "Stream":
        """Raises `ConnectError`."""
        host, port = (self._host, self._port) if self._proxy is None else (self._proxy.host, self._proxy.port)
        try:
            connection = Stream(await open_socket(host, port), context)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a name that DNS can have
            raise ConnectError(f"{_authority(host, port)}: {cause_of(error)}") from error
        try:
            if self._proxy is not None:
                await self._tunnel(connection, self._proxy)
            if context is not None:
                await connection.handshake(context, self._server_name)
        except (OSError, ValueError) as error:
            connection.close()
            raise ConnectError(f"{self.authority}: {cause_of(error)}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _tunnel(self, connection: "Stream", proxy: Proxy) -> None:
        """Raises `ConnectError`."""
        fields = [("Host", self.authority)]
        if proxy.authorization:
            fields.append(("Proxy-Authorization", proxy.authorization))
        name = f"proxy {_authority(proxy.host, proxy.port)}"
        try:
            await connection.send(_serialize("CONNECT", self.authority, fields, None))
            head = await _read_head(connection)
        except HttpClientError as error:
            raise ConnectError(f"{name}: {error}") from error
        if not 200 <= head.status < 300 or connection.received:
            raise ConnectError(f"{name}: found {head.status} {head.phrase}, expected 200 and a tunnel")


class Response:
    """A response. Its body is read once, by `read` or `chunks`."""

    def __init__(self, connection: "Stream", head: "_Head") -> None:
        self.status = head.status
        self.phrase = head.phrase
        self.fields = head.fields  # by lower-case names
        self.connection = connection
        self._head = head
        self._complete = head.length == 0

    @property
    def reusable(self) -> bool:
        """Whether the connection can be used again: the body was read to its end."""
        return self._complete and self._head.keep_alive and not self.connection.received

    async def read(self, limit: int) -> bytes:
        """The body. Raises `HttpClientError`, also for more than `limit` bytes."""
        body = bytearray()
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    raise ProtocolError(f"found a body of more than {limit} bytes")
        return bytes(body)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives. Raises `HttpClientError`."""
        connection = self.connection
        if self._head.chunked:
            chunks = _read_chunked(connection)
        elif self._head.length is not None:
            chunks = _read_exactly(connection, self._head.length)
        else:
            chunks = _read_until_close(connection)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        self._complete = True


class _Head:
    """The status line and the fields that frame the body. Raises `ProtocolError`."""

    def __init__(self, text: bytes) -> None:
        first, *lines = text.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise ProtocolError(f"found {first[:60]!a}, expected a status line of HTTP/1.1")
        if len(lines) > _MAX_FIELDS:
            raise ProtocolError(f"found {len(lines)} header fields, expected at most {_MAX_FIELDS}")
        self.status = int(found[2])
        self.phrase = (found[3] or b"").decode("latin-1")
        self.fields: dict[str, str] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise ProtocolError(f"found the header field {line[:60]!a}, expected name: value")
            name, value = field[1].decode("ascii").lower(), field[2].strip(b" \t").decode("latin-1")
            if name in ("content-length", "transfer-encoding") and self.fields.get(name, value) != value:
                raise ProtocolError(f"found two different {name} fields")
            self.fields[name] = value
        self.chunked, self.length = self._framing()
        closes = found[1] == b"0" or "close" in self.fields.get("connection", "").lower()
        self.keep_alive = not closes and (self.chunked or self.length is not None)

    def _framing(self) -> tuple[bool, int | None]:
        """Whether the body is chunked, and its length if it is known; else it ends with the connection."""
        coding, length = self.fields.get("transfer-encoding"), self.fields.get("content-length")
        if coding is not None and (coding.strip().lower() != "chunked" or length is not None):
            also = "" if length is None else f" and content-length {length[:20]!a}"
            raise ProtocolError(f"found transfer-encoding {coding[:60]!a}{also}, expected chunked alone")
        if length is not None and not _LENGTH.fullmatch(length.encode("latin-1")):
            raise ProtocolError(f"found content-length {length[:60]!a}, expected a number")
        if self.status < 200 or self.status in (204, 304):
            return False, 0
        return coding is not None, int(length) if length is not None else None


async def _send(connection: Stream, message: bytes, before_send: Callable[[], None]) -> Response:
    """Sends a request and reads the head of the response. Raises `HttpClientError`."""
    try:
        before_send()
        await connection.send(message)
        return Response(connection, await _read_head(connection))
    except BaseException:
        connection.close()
        raise


async def _read_head(connection: Stream) -> _Head:
    """The first head that is not an interim response."""
    for _ in range(_MAX_INTERIM + 1):
        while (end := connection.received.find(b"\r\n\r\n")) < 0:
            if len(connection.received) > _MAX_HEAD:
                raise ProtocolError(f"found a head of more than {_MAX_HEAD} bytes")
            await connection.receive_more()
        head = _Head(connection.take(end + 4)[:end])
        if head.status == 101:
            raise ProtocolError("found 101 Switching Protocols, expected no upgrade")
        if head.status >= 200:
            return head
    raise ProtocolError(f"found more than {_MAX_INTERIM} interim responses")


async def _read_chunked(connection: Stream) -> AsyncGenerator[bytes, None]:
    while True:
        line = await _read_line(connection)
        found = _CHUNK_HEAD.fullmatch(line)
        if found is None:
            raise ProtocolError(f"found a chunk of size {line[:40]!a}, expected a hexadecimal number")
        if not (size := int(found[1], 16)):
            break
        async with contextlib.aclosing(_read_exactly(connection, size)) as chunks:
            async for chunk in chunks:
                yield chunk
        if line := await _read_line(connection):
            raise ProtocolError(f"found {line[:40]!a} at the end of a chunk")
    for _ in range(_MAX_FIELDS + 1):
        if not await _read_line(connection):
            return
    raise ProtocolError(f"found more than {_MAX_FIELDS} trailer fields")


async def _read_exactly(connection: Stream, size: int) -> AsyncGenerator[bytes, None]:
    while size:
        if not connection.received:
            await connection.receive_more()
        chunk = connection.take(min(size, len(connection.received)))
        size -= len(chunk)
        yield chunk


async def _read_until_close(connection: Stream) -> AsyncGenerator[bytes, None]:
    while connection.received or await connection.receive():
        yield connection.take(len(connection.received))


async def _read_line(connection: Stream) -> bytes:
    while (end := connection.received.find(b"\r\n")) < 0:
        if len(connection.received) > _MAX_LINE:
            raise ProtocolError(f"found a line of more than {_MAX_LINE} bytes")
        await connection.receive_more()
    return connection.take(end + 2)[:end]


def _serialize(method: str, target: str, fields: Sequence[tuple[str, str]], body: bytes | None) -> bytes:
    """Raises `ProtocolError` for a target or a field that would become something else on the wire."""
    if not _TARGET.fullmatch(target):
        raise ProtocolError(f"found the request target {target[:60]!a}, expected printable ASCII without blanks")
    for name, value in fields:
        if _NOT_IN_FIELDS.search(value):
            # Without the value, which may be a secret.
            raise ProtocolError(f"the header field {name} contains a control or non-ASCII character")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("ascii") + (body or b"")


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
