"""Headers: decoded with hpack and checked, encoded as plain literals, and the few that gRPC gives a meaning.

Ours use neither Huffman codes nor the dynamic table, so that writing them needs no state. Facts: RFC 7541, RFC 9113
(section 8), and gRPC's "gRPC over HTTP2".
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from hpack import Decoder, HPACKError

from accelplane.rpc.errors import STATUSES, Code, ConnectionFault, RpcError, StreamFault

Headers = Mapping[bytes, bytes]

# Compressed and decoded. hpack copies what is left of a block for each literal, so that more would cost too much time.
MAX_HEADERS = 16384
# Three times as much when encoded; headers of 8 KiB are what every peer takes.
_MAX_STATUS_TEXT = 2048

_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_NOT_IN_VALUES = re.compile(rb"[\0\r\n]")
_OF_CONNECTIONS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_COLON = 0x3A
_PSEUDO = {b":method", b":scheme", b":path", b":authority", b":status"}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")
# What a status of HTTP means where there is none of gRPC.
_HTTP_STATUSES = {
    b"400": "INTERNAL", b"401": "UNAUTHENTICATED", b"403": "PERMISSION_DENIED", b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE", b"502": "UNAVAILABLE", b"503": "UNAVAILABLE", b"504": "UNAVAILABLE",
}  # fmt: skip


class Request(NamedTuple):
    """What a client's headers ask for."""

    path: bytes
    timeout: float | None  # seconds


class Refusal(NamedTuple):
    """Why a client's headers are no call."""

    http_status: bytes
    code: str
    text: str


class HeaderDecoder:
    """Decodes the header blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        self._last_block: bytes | None = None
        self._last: Headers = {}

    def decode(self, block: bytes) -> Headers:
        """Raises `ConnectionFault` when nothing can be decoded any more, `StreamFault` for a malformed list."""
        if block == self._last_block:
            return self._last
        self._last_block = None
        try:
            fields = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ConnectionFault(
                Code.COMPRESSION_ERROR, f"headers cannot be decoded: {type(error).__name__}"
            ) from error
        headers: dict[bytes, bytes] = {}
        ordinary = False
        for name, value in fields:
            if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS or _NOT_IN_VALUES.search(value):
                raise StreamFault(Code.PROTOCOL_ERROR, "a header that HTTP/2 does not allow")
            if name[0] != _COLON:
                ordinary = True
            elif ordinary or name not in _PSEUDO or name in headers:
                raise StreamFault(Code.PROTOCOL_ERROR, "a pseudo-header that is unknown, late or there twice")
            headers[name] = value
        # Indexed fields only, which leave the table unchanged (an index above 126 ends with a byte below 0x80).
        if block and min(block) >= 0x80:
            self._last_block, self._last = block, headers
        return headers


def read_request(headers: Headers) -> Request | Refusal:
    """What a client wants, or why not. Raises `StreamFault` for headers that are no request."""
    if b":status" in headers or not (b":method" in headers and b":scheme" in headers and headers.get(b":path")):
        raise StreamFault(Code.PROTOCOL_ERROR, "no request: method, scheme and path are needed")
    if headers[b":method"] != b"POST":
        return Refusal(b"405", "UNIMPLEMENTED", "calls are made with POST")
    if not _is_grpc(headers):
        return Refusal(b"415", "UNKNOWN", "expected a content-type of application/grpc")
    if headers.get(b"te") != b"trailers":
        return Refusal(b"400", "INTERNAL", "expected te: trailers")
    given = headers.get(b"grpc-timeout")
    if given is None:
        return Request(headers[b":path"], None)
    timeout = _TIMEOUT.fullmatch(given)
    if not timeout:
        return Refusal(b"400", "INTERNAL", "malformed grpc-timeout")
    return Request(headers[b":path"], int(timeout[1]) * _SECONDS[timeout[2]])


def read_refusal(headers: Headers) -> RpcError | None:
    """Why the first headers of an answer bring none of gRPC's."""
    status = headers.get(b":status", b"")
    if b"grpc-status" in headers or (status == b"200" and _is_grpc(headers)):
        return None
    if status != b"200":
        code = _HTTP_STATUSES.get(status, "UNKNOWN")
        return RpcError(code, f"HTTP status {status[:20].decode('latin-1') or 'missing'}")
    return RpcError("UNKNOWN", f"the answer's content-type is {headers.get(b'content-type', b'')[:100]!r}")


def read_status(trailers: Headers) -> RpcError | None:
    """How a call ended, None when all went well."""
    given = trailers.get(b"grpc-status")
    if given is None:
        return RpcError("UNKNOWN", "the answer ended without a status")
    number = int(given) if given.isdigit() and len(given) < 4 else 2
    if number == 0:
        return None
    text = _ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)), trailers.get(b"grpc-message", b""))
    return RpcError(STATUSES[number] if number < len(STATUSES) else "UNKNOWN", text.decode("utf-8", "replace"))


def _is_grpc(headers: Headers) -> bool:
    return headers.get(b"content-type", b"").startswith(b"application/grpc")


# In front of every block: we use no dynamic table. Says so before a peer that wants a smaller one must insist.
NO_TABLE = b"\x20"


def literal(name: bytes, value: bytes) -> bytes:
    """A header as a literal without indexing."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    number = len(text)
    if number < 0x7F:
        return bytes((number,))
    number -= 0x7F
    encoded = bytearray((0x7F,))
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def status_fields(code: str, text: str) -> bytes:
    """`grpc-status` and `grpc-message`, encoded; a name that gRPC does not know is `UNKNOWN`."""
    number = STATUSES.index(code) if code in STATUSES else STATUSES.index("UNKNOWN")
    status = literal(b"grpc-status", str(number).encode())
    return status + literal(b"grpc-message", _sendable(text)) if text else status


def _sendable(text: str) -> bytes:
    """As a status can carry it: a peer drops headers that are too long, and only some characters are allowed."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > _MAX_STATUS_TEXT:
        data = (data[:_MAX_STATUS_TEXT].decode("utf-8", "ignore") + "…").encode()
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in data).encode()


def timeout_field(seconds: float) -> bytes:
    """`grpc-timeout`, encoded: in the finest unit that 8 digits suffice for."""
    for unit, size in ((b"u", 1e-6), (b"m", 1e-3), (b"S", 1.0)):
        if (number := max(1, round(seconds / size))) < 10**8:
            return literal(b"grpc-timeout", str(number).encode() + unit)
    return literal(b"grpc-timeout", b"99999999S")
