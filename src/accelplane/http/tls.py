"""TLS of one server connection without its socket."""

import contextlib
import ssl
from collections.abc import Callable

# Returns the context of a new connection.
ConnectionContext = Callable[[], ssl.SSLContext]

_CHUNK = 64 * 1024


class TlsSession:
    """The server's end of one TLS connection: bytes in, bytes out.

    asyncio's TLS transports allocate 256 KiB for each connection as soon as it is accepted: sixty silent clients would
    exceed a memory limit of 30 MiB.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.handshake_done = False
        self.eof = False

    def decrypt(self, data: bytes | memoryview) -> bytes:
        """The plain text in `data`, empty until a record is complete. Raises `ssl.SSLError`."""
        self._incoming.write(data)
        chunks: list[bytes] = []
        try:
            if not self.handshake_done:
                self._object.do_handshake()
                self.handshake_done = True
            while self._incoming.pending or self._object.pending():
                chunk = self._object.read(_CHUNK)
                if not chunk:
                    self.eof = True
                    break
                chunks.append(chunk)
        except ssl.SSLWantReadError:
            pass
        return b"".join(chunks)

    @property
    def certificate_name(self) -> str:
        """The common name of the verified client certificate, `-` if it has none; empty without a certificate."""
        found = self._object.getpeercert() if self.handshake_done else None
        if not found:
            return ""
        subject = found.get("subject")
        pairs = [pair for name in subject for pair in name] if isinstance(subject, tuple) else []
        names = [str(pair[1]) for pair in pairs if pair[0] == "commonName"]
        return names[0] if names else "-"

    def encrypt(self, data: bytes | memoryview) -> None:
        """Encrypts `data`; `outgoing` returns the records. Raises `ssl.SSLError`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._object.write(rest) :]

    def close(self) -> None:
        """Queues a close_notify alert and does not wait for the client's."""
        # Fails during the handshake, and when the client has sent data that is not read.
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()

    def outgoing(self) -> bytes:
        """Returns and removes the pending output."""
        return self._outgoing.read() if self._outgoing.pending else b""
