"""A TCP stream with or without TLS, and the errors of a client on it.

Sockets are used directly, with TLS on memory BIOs: asyncio's TLS transports allocate 256 KiB for each connection, and a
controller has one for each watch. Facts: RFC 8446.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Generator

_RECV_SIZE = 64 * 1024


class HttpClientError(Exception):
    """A failed request; the message has the cause."""


class ConnectError(HttpClientError):
    """There is no connection: name, network, proxy or TLS. The request was not sent."""


class ConnectionLost(HttpClientError):
    """The connection ended before the response was complete."""


class Stream:
    """A socket, with or without TLS, and the bytes that were received and not yet read."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext | None) -> None:
        self.context = context
        self.received = bytearray()
        self.has_received = False  # since the last response
        self.expiry: asyncio.TimerHandle | None = None
        self._socket = connected
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()

    async def handshake(self, context: ssl.SSLContext, name: str) -> None:
        """Raises `OSError`, or `ValueError` for a name that cannot be verified."""
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionResetError("the server ended the TLS handshake") from None
            else:
                await self._flush()
                self._tls = tls
                return

    async def send(self, message: bytes) -> None:
        """Raises `ConnectionLost`."""
        with _connection_errors():
            if self._tls is None:
                await asyncio.get_running_loop().sock_sendall(self._socket, message)
                return
            for start in range(0, len(message), _RECV_SIZE):
                self._tls.write(message[start : start + _RECV_SIZE])
                await self._flush()

    async def receive(self) -> bool:
        """Receives more bytes; returns whether there were any. Raises `ConnectionLost`."""
        with _connection_errors():
            data = await self._receive()
        self.received += data
        self.has_received = self.has_received or bool(data)
        return bool(data)

    async def receive_more(self) -> None:
        """Raises `ConnectionLost`, also at the end of the connection."""
        if not await self.receive():
            raise ConnectionLost("the server closed the connection before the response was complete")

    def take(self, size: int) -> bytes:
        """Removes and returns the first bytes received."""
        data = bytes(memoryview(self.received)[:size])
        if size == len(self.received):
            self.received = bytearray()  # an emptied bytearray does not release its memory
        else:
            del self.received[:size]
        return data

    def is_idle(self) -> bool:
        """Whether nothing was received since the last response, neither bytes nor the end. Ends the expiry."""
        if self.expiry is not None:
            self.expiry.cancel()
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
            return await asyncio.get_running_loop().sock_recv(self._socket, _RECV_SIZE)
        while True:
            try:
                return self._tls.read(_RECV_SIZE)
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    async def _fill(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self._socket, _RECV_SIZE)
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await asyncio.get_running_loop().sock_sendall(self._socket, self._outgoing.read())


async def open_socket(host: str, port: int) -> socket.socket:
    """Raises the `OSError` of the last address that was tried."""
    loop = asyncio.get_running_loop()
    try:
        # An address needs no thread.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError("no address")
    for family, kind, protocol, _, address in found:
        connected = socket.socket(family, kind, protocol)
        try:
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connected, address)
        except OSError as error:
            connected.close()
            failure = error
        except BaseException:
            connected.close()
            raise
        else:
            return connected
    raise failure


def cause_of(error: OSError | ValueError) -> str:
    """The problem in words; asyncio replaces those of the kernel by its own."""
    if isinstance(error, ssl.SSLError | socket.gaierror) and error.strerror:
        return error.strerror
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


@contextlib.contextmanager
def _connection_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionLost(cause_of(error)) from error
