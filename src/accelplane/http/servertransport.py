"""The transport of a server connection: bytes from and to its client, with or without TLS."""

import asyncio

from accelplane.http import acceptqueue
from accelplane.http.tls import ConnectionContext, TlsSession


class ServerTransport:
    """An asyncio transport of a socket. With a `context`, the bytes on it are TLS records.

    Before `attach` there is no client: data to write is dropped.
    """

    __slots__ = ("_context", "_tls", "_transport")

    def __init__(self, context: ConnectionContext | None) -> None:
        self._context = context
        self._tls: TlsSession | None = None  # made with the first data: most of a connection's memory
        self._transport: asyncio.Transport | None = None

    def attach(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"expected a transport of a stream, found {transport!r}")
        self._transport = transport

    @property
    def attached(self) -> bool:
        return self._transport is not None

    @property
    def closing(self) -> bool:
        """Whether the transport is closing or closed, or not attached."""
        return self._transport is None or self._transport.is_closing()

    @property
    def handshaking(self) -> bool:
        """Whether the client has begun a TLS handshake that is not complete."""
        return self._tls is not None and not self._tls.handshake_done

    @property
    def handshake_done(self) -> bool:
        return self._tls is not None and self._tls.handshake_done

    @property
    def eof(self) -> bool:
        """Whether the client has sent a close_notify alert."""
        return self._tls is not None and self._tls.eof

    @property
    def certificate_name(self) -> str:
        """The name in the verified client certificate, as `Request.certificate_name`."""
        return self._tls.certificate_name if self._tls is not None else ""

    @property
    def reading(self) -> bool:
        """Whether data of the client is read: reading is neither paused nor ended."""
        return self._transport is not None and self._transport.is_reading()

    @property
    def has_unread_data(self) -> bool:
        """Whether the kernel has data of the client that is read next."""
        if self._transport is None or not self._transport.is_reading():
            return False
        return acceptqueue.has_unread_data(self._transport.get_extra_info("socket"))

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed its side, also if data before it is not read."""
        return self._transport is not None and acceptqueue.is_disconnected(self._transport.get_extra_info("socket"))

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def decrypt(self, data: memoryview) -> bytes | memoryview:
        """The plain text in `data`, which is `data` without TLS; continues the handshake. Raises `ssl.SSLError`."""
        if self._context is None:
            return data
        tls = self._tls = self._tls or TlsSession(self._context())
        try:
            return tls.decrypt(data)
        finally:
            self._flush(tls)

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is None:
            return
        if self._tls is None:
            self._transport.write(data)
        else:
            self._tls.encrypt(data)
            self._flush(self._tls)

    def close(self) -> None:
        """Closes the transport after the data written so far."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None:
            self._tls.close()
            self._flush(self._tls)
        self._transport.close()

    def abort(self) -> None:
        """Closes the transport and drops the data that is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self, tls: TlsSession) -> None:
        if self._transport is not None and (records := tls.outgoing()):
            self._transport.write(records)
