"""A minimal gRPC client: writes and reads HTTP/2 frames on a blocking socket.

A call of the grpcio client takes longer than the agent's response. This client takes some tens of microseconds, like
the Go client that measured the peers. Specifications: RFC 9113, gRPC over HTTP/2.
"""

import socket
import struct
from typing import Self

from hpack import Encoder

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW, _MAX_WINDOW = 4, 2**31 - 1


class RawGrpcClient:
    """Calls one unary method on the socket at `path`."""

    def __init__(self, path: str, method: str) -> None:
        headers = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
        encoder = Encoder()
        self._first = encoder.encode(headers)
        self._later = encoder.encode(headers)  # references to the server's dynamic table
        self._stream = -1
        self._received = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(10)
        self._socket.connect(path)
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _MAX_WINDOW))
            # The connection's flow-control window, so that it needs no updates.
            + _frame(8, 0, 0, struct.pack(">I", _MAX_WINDOW - 65535))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, request: bytes) -> bytes:
        """Returns the response message. Raises `RuntimeError` if the call fails."""
        self._stream += 2
        headers, self._first = self._first, self._later
        message = struct.pack(">BI", 0, len(request)) + request
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, headers) + _frame(_DATA, _END_STREAM, self._stream, message)
        )
        answer = b""
        while True:
            kind, flags, stream, payload = self._next()
            if kind == _DATA and stream == self._stream:
                answer += payload
            elif kind == _HEADERS and flags & _END_STREAM and stream == self._stream:
                if len(answer) < 5:
                    raise RuntimeError(f"call failed: trailers {payload!r}")
                return answer[5:]
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                raise RuntimeError(f"call aborted by the server: frame type {kind}, {payload!r}")

    def _next(self) -> tuple[int, int, int, bytes]:
        while len(self._received) < 9 or len(self._received) < 9 + int.from_bytes(self._received[:3]):
            chunk = self._socket.recv(65536)
            if not chunk:
                raise RuntimeError("connection closed by the server")
            self._received += chunk
        end = 9 + int.from_bytes(self._received[:3])
        frame, self._received = self._received[:end], self._received[end:]
        return frame[3], frame[4], int.from_bytes(frame[5:9]) & 0x7FFFFFFF, frame[9:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
