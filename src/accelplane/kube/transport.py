"""HTTP/1.1 to one API server, as a transport of httpx2: bare sockets of asyncio, and TLS without buffers of its own.

The transport that httpx2 brings stands on three libraries, which cost a program 4 MiB before its first request, and
asyncio's TLS would hold 256 KiB for each connection; a controller has a connection for every watch. This one speaks to
the one server that it is for, through no proxy, and keeps connections for a while after an answer.

Facts: RFC 9112 (message framing), RFC 9110 (1xx, 204 and 304 have no body), RFC 8446.
"""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator

import httpx2

_PIECE = 64 * 1024
_MAX_HEAD = 64 * 1024
_MAX_LINE = 1024
_IDLE = 15.0

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n]*))?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")


class Transport(httpx2.AsyncBaseTransport):
    """Connections to the server that requests name, verified by `context` where that is an https one."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._idle: list[_Connection] = []
        self._closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises `httpx2.TransportError`."""
        timeouts = _Timeouts(request)
        connection = self._take() or await self._connected(request.url, timeouts)
        try:
            await connection.send(_message(request), timeouts)
            head = await _head(connection, timeouts)
        except BaseException:
            connection.close()
            raise
        return httpx2.Response(
            head.status,
            headers=head.fields,
            stream=_Body(self, connection, head, timeouts),
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": head.phrase},
        )

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def keep(self, connection: "_Connection") -> None:
        """Has a connection, whose answer was read to its end, wait for another request."""
        if self._closed:
            connection.close()
            return
        self._idle.append(connection)
        connection.expiry = asyncio.get_running_loop().call_later(_IDLE, self._expire, connection)

    def _take(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.waits():
                return connection
            connection.close()
        return None

    def _expire(self, connection: "_Connection") -> None:
        if connection in self._idle:
            self._idle.remove(connection)
            connection.close()

    async def _connected(self, url: httpx2.URL, timeouts: "_Timeouts") -> "_Connection":
        host, secure = url.host, url.scheme == "https"
        with _failing(httpx2.ConnectError, httpx2.ConnectTimeout):
            async with asyncio.timeout(timeouts.connect):
                connection = _Connection(await _connected_socket(host, url.port or (443 if secure else 80)))
                try:
                    if secure:
                        await connection.secure(self._context or ssl.create_default_context(), host)
                except BaseException:
                    connection.close()
                    raise
                return connection


class _Timeouts:
    """How long each step of a request may take; None is for ever."""

    def __init__(self, request: httpx2.Request) -> None:
        given: dict[str, float | None] = request.extensions.get("timeout", {})
        self.connect = given.get("connect")
        self.read = given.get("read")
        self.write = given.get("write")


class _Connection:
    """A socket, with or without TLS, and what was received and not read yet."""

    def __init__(self, connected: socket.socket) -> None:
        self.received = bytearray()
        self.expiry: asyncio.TimerHandle | None = None
        self._socket = connected
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()

    async def secure(self, context: ssl.SSLContext, name: str) -> None:
        """Raises `OSError`."""
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionResetError("the server ended the handshake") from None
            else:
                await self._flush()
                return

    async def send(self, message: bytes, timeouts: _Timeouts) -> None:
        """Raises `httpx2.TransportError`."""
        with _failing(httpx2.WriteError, httpx2.WriteTimeout):
            async with asyncio.timeout(timeouts.write):
                if self._tls is None:
                    await asyncio.get_running_loop().sock_sendall(self._socket, message)
                    return
                for start in range(0, len(message), _PIECE):
                    self._tls.write(message[start : start + _PIECE])
                    await self._flush()

    async def receive(self, timeouts: _Timeouts) -> bool:
        """Receives more; False at the end. Raises `httpx2.TransportError`."""
        with _failing(httpx2.ReadError, httpx2.ReadTimeout):
            async with asyncio.timeout(timeouts.read):
                piece = await self._receive()
        self.received += piece
        return bool(piece)

    async def expect(self, timeouts: _Timeouts) -> None:
        """Receives more, of which there has to be some. Raises `httpx2.TransportError`."""
        if not await self.receive(timeouts):
            raise httpx2.RemoteProtocolError("the server closed the connection before its answer was whole")

    def waits(self) -> bool:
        """Whether nothing has come, neither words nor an end, since the last answer."""
        if self.expiry is not None:
            self.expiry.cancel()
        if self.received:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
        self._socket.close()

    async def _receive(self) -> bytes:
        if self._tls is None:
            return await asyncio.get_running_loop().sock_recv(self._socket, _PIECE)
        while True:
            try:
                return self._tls.read(_PIECE)
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    async def _fill(self) -> bool:
        ciphered = await asyncio.get_running_loop().sock_recv(self._socket, _PIECE)
        self._incoming.write(ciphered)
        return bool(ciphered)

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await asyncio.get_running_loop().sock_sendall(self._socket, self._outgoing.read())


class _Head:
    """What stands before an answer's body. Raises `httpx2.RemoteProtocolError`."""

    def __init__(self, text: bytes) -> None:
        first, *lines = text.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise httpx2.RemoteProtocolError(f"answered {first[:60]!a}, expected HTTP/1.1")
        self.status = int(found[2])
        self.phrase = found[3] or b""
        self.fields: list[tuple[bytes, bytes]] = []
        known: dict[bytes, bytes] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise httpx2.RemoteProtocolError(f"answered with the header {line[:60]!a}")
            name, value = field[1].lower(), field[2]
            if name in (b"content-length", b"transfer-encoding") and known.get(name, value) != value:
                raise httpx2.RemoteProtocolError(f"answered with two of {name.decode()}")
            known[name] = value
            self.fields.append((field[1], value))
        coding = known.get(b"transfer-encoding", b"").strip().lower()
        length = known.get(b"content-length")
        if coding not in (b"", b"chunked"):
            raise httpx2.RemoteProtocolError(f"answered with Transfer-Encoding {coding[:60]!a}")
        if length is not None and not _LENGTH.fullmatch(length):
            raise httpx2.RemoteProtocolError(f"answered with Content-Length {length[:60]!a}")
        self.chunked = bool(coding)
        # None is until the server closes the connection.
        self.length = None if self.chunked or length is None else int(length)
        if self.status in (204, 304):
            self.chunked, self.length = False, 0
        ends = b"close" in known.get(b"connection", b"").lower() or found[1] == b"0"
        self.keeps = not ends and (self.chunked or self.length is not None)


class _Body(httpx2.AsyncByteStream):
    """An answer's body. Its connection is kept when it was read to its end, and closed when it was not."""

    def __init__(self, transport: Transport, connection: _Connection, head: _Head, timeouts: _Timeouts) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._head = head
        self._timeouts = timeouts
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if (connection := self._connection) is None:
            return
        pieces = _chunks(connection, self._timeouts) if self._head.chunked else self._plain(connection)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece
        self._whole = True

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._head.keeps and (self._whole or self._head.length == 0):
            self._transport.keep(connection)
        else:
            connection.close()

    async def _plain(self, connection: _Connection) -> AsyncGenerator[bytes, None]:
        if self._head.length is not None:
            async with contextlib.aclosing(_exactly(connection, self._head.length, self._timeouts)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        while connection.received or await connection.receive(self._timeouts):
            yield _taken(connection, len(connection.received))


async def _head(connection: _Connection, timeouts: _Timeouts) -> _Head:
    while True:
        while (end := connection.received.find(b"\r\n\r\n")) < 0:
            if len(connection.received) > _MAX_HEAD:
                raise httpx2.RemoteProtocolError(f"answered with more than {_MAX_HEAD} bytes of headers")
            await connection.expect(timeouts)
        head = _Head(_taken(connection, end + 4)[:end])
        if head.status >= 200:
            return head


async def _chunks(connection: _Connection, timeouts: _Timeouts) -> AsyncGenerator[bytes, None]:
    while True:
        line = await _line(connection, timeouts)
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise httpx2.RemoteProtocolError(f"answered with a chunk of size {line[:40]!a}")
        if not (size := int(found[1], 16)):
            break
        async with contextlib.aclosing(_exactly(connection, size, timeouts)) as pieces:
            async for piece in pieces:
                yield piece
        if await _line(connection, timeouts):
            raise httpx2.RemoteProtocolError("answered with a chunk that does not end where it should")
    while await _line(connection, timeouts):
        pass  # trailers, of which nobody asks anything


async def _exactly(connection: _Connection, size: int, timeouts: _Timeouts) -> AsyncGenerator[bytes, None]:
    while size:
        if not connection.received:
            await connection.expect(timeouts)
        piece = _taken(connection, min(size, len(connection.received)))
        size -= len(piece)
        yield piece


async def _line(connection: _Connection, timeouts: _Timeouts) -> bytes:
    while (end := connection.received.find(b"\r\n")) < 0:
        if len(connection.received) > _MAX_LINE:
            raise httpx2.RemoteProtocolError(f"answered with a line of more than {_MAX_LINE} bytes")
        await connection.expect(timeouts)
    return _taken(connection, end + 2)[:end]


def _taken(connection: _Connection, size: int) -> bytes:
    piece = bytes(memoryview(connection.received)[:size])
    if size == len(connection.received):
        connection.received = bytearray()  # one that was emptied keeps its memory
    else:
        del connection.received[:size]
    return piece


def _message(request: httpx2.Request) -> bytes:
    """The request as it is sent. Raises `httpx2.LocalProtocolError` for headers that would be more than they are."""
    for name, value in request.headers.raw:
        if _CONTROL.search(value):
            # Its value may be a secret: a token of two lines.
            raise httpx2.LocalProtocolError(f"the header {name.decode('latin-1')} has a line break or the like in it")
    head = b"\r\n".join(
        [
            b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path),
            *(b"%s: %s" % field for field in request.headers.raw),
            b"",
            b"",
        ]
    )
    return head + request.content


async def _connected_socket(host: str, port: int) -> socket.socket:
    """Raises `OSError` of the last address that was tried."""
    loop = asyncio.get_running_loop()
    try:
        # For an address no thread is needed.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host}: no address")
    for family, kind, protocol, _, address in found:
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(made, address)
        except OSError as error:
            made.close()
            failure = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise failure


@contextlib.contextmanager
def _failing(error: type[httpx2.TransportError], timeout: type[httpx2.TimeoutException]) -> Generator[None]:
    """Makes errors of sockets and TLS those of httpx2."""
    try:
        yield
    except TimeoutError as found:
        raise timeout(str(found)) from found
    except OSError as found:
        raise error(str(found)) from found
