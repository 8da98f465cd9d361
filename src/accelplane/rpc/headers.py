"""Headers: decoding and validation, encoding as plain literals, and the headers that gRPC defines.

Encoding uses neither Huffman codes nor the dynamic table, and so needs no state. Specifications: RFC 7541, RFC 9113
(section 8), and gRPC's "gRPC over HTTP2".
"""

import re
from collections.abc import Mapping

from hpack import Decoder, HPACKError
from hpack.hpack import encode_integer

from accelplane.rpc.errors import STATUSES, Code, ConnectionFault, RpcError, StreamFault

Headers = Mapping[bytes, bytes]

# Limit on a block, compressed and decoded. hpack copies the rest of a block for each literal: time grows quadratically.
MAX_HEADERS = 16384
_MAX_CACHED_BLOCK, _MAX_CACHED_BLOCKS = 128, 8
# Percent-encoding makes it up to three times as long, and every peer accepts headers of 8 KiB.
_MAX_STATUS_TEXT = 2048

_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_INVALID_IN_VALUE = re.compile(rb"[\0\r\n]")
_CONNECTION_HEADERS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_COLON = 0x3A
_PSEUDO_HEADERS = {b":method", b":scheme", b":path", b":authority", b":status"}
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Status codes for a response without grpc-status.
_HTTP_STATUSES = {
    b"400": "INTERNAL", b"401": "UNAUTHENTICATED", b"403": "PERMISSION_DENIED", b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE", b"502": "UNAVAILABLE", b"503": "UNAVAILABLE", b"504": "UNAVAILABLE",
}  # fmt: skip


class Rejection(RpcError):
    """Headers that are not a valid call, and the status of the response."""

    def __init__(self, http_status: bytes, code: str, text: str) -> None:
        super().__init__(code, text)
        self.http_status = http_status


class HeaderDecoder:
    """Decodes the header blocks of one connection, in the order of their arrival."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        # Blocks that left the dynamic table unchanged, until another one changes it: decoded again they are the same.
        self._cache: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Raises `ConnectionFault` if the block cannot be decoded, `StreamFault` if its headers are malformed."""
        if (cached := self._cache.get(block)) is not None:
            return cached
        before = self._table_state()
        try:
            fields = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"cannot decode headers: {type(error).__name__}") from error
        after = self._table_state()
        cacheable = after[0] is before[0] and after[1:] == before[1:]  # an equal entry may be a new one
        if not cacheable:
            self._cache.clear()
        headers: dict[bytes, bytes] = {}
        regular_seen = False
        for name, value in fields:
            if not _NAME.fullmatch(name) or name in _CONNECTION_HEADERS or _INVALID_IN_VALUE.search(value):
                raise StreamFault(Code.PROTOCOL_ERROR, "invalid header")
            if name[0] != _COLON:
                regular_seen = True
            elif regular_seen or name not in _PSEUDO_HEADERS or name in headers:
                raise StreamFault(Code.PROTOCOL_ERROR, "unknown, repeated or misplaced pseudo-header")
            headers[name] = value
        if cacheable and len(block) <= _MAX_CACHED_BLOCK:
            if len(self._cache) >= _MAX_CACHED_BLOCKS:
                self._cache.clear()
            self._cache[block] = headers
        return headers

    def _table_state(self) -> tuple[object, int, int]:
        """The newest entry of the dynamic table, the number of its entries, and its maximum size."""
        table = self._decoder.header_table
        return table.dynamic_entries[0] if table.dynamic_entries else None, len(table.dynamic_entries), table.maxsize


def read_request(headers: Headers) -> tuple[bytes, float | None]:
    """Returns path and timeout of a call. Raises `Rejection`, or `StreamFault` if it is no HTTP request."""
    if b":status" in headers or not (b":method" in headers and b":scheme" in headers and headers.get(b":path")):
        raise StreamFault(Code.PROTOCOL_ERROR, "invalid request, expected :method, :scheme and :path")
    if headers[b":method"] != b"POST":
        raise Rejection(b"405", "UNIMPLEMENTED", "unexpected method, expected POST")
    if not _is_grpc(headers):
        raise Rejection(b"415", "UNKNOWN", "unexpected content-type, expected application/grpc")
    if headers.get(b"te") != b"trailers":
        raise Rejection(b"400", "INTERNAL", "missing header, expected te: trailers")
    text = headers.get(b"grpc-timeout")
    if text is None:
        return headers[b":path"], None
    timeout = _TIMEOUT.fullmatch(text)
    if not timeout:
        raise Rejection(b"400", "INTERNAL", "malformed grpc-timeout")
    return headers[b":path"], int(timeout[1]) * _SECONDS[timeout[2]]


def response_error(headers: Headers) -> RpcError | None:
    """Returns an error if the first headers of a response are not gRPC's."""
    status = headers.get(b":status", b"")
    if b"grpc-status" in headers or (status == b"200" and _is_grpc(headers)):
        return None
    if status != b"200":
        code = _HTTP_STATUSES.get(status, "UNKNOWN")
        return RpcError(code, f"HTTP status {status[:20].decode('latin-1') or 'missing'}")
    return RpcError(
        "UNKNOWN", f"content-type is {headers.get(b'content-type', b'')[:100]!r}, expected application/grpc"
    )


def status_error(trailers: Headers) -> RpcError | None:
    """Returns the error of a call's trailers, None for status OK."""
    text = trailers.get(b"grpc-status")
    if text is None:
        return RpcError("UNKNOWN", "the response ended without a status")
    number = int(text) if text.isdigit() and len(text) < 4 else STATUSES.index("UNKNOWN")
    if number == 0:
        return None
    message = _ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)), trailers.get(b"grpc-message", b""))
    return RpcError(STATUSES[number] if number < len(STATUSES) else "UNKNOWN", message.decode("utf-8", "replace"))


def _is_grpc(headers: Headers) -> bool:
    return headers.get(b"content-type", b"").startswith(b"application/grpc")


# A dynamic table size update to 0, which starts every block: valid for every limit that the peer sets.
EMPTY_TABLE = b"\x20"


def literal(name: bytes, value: bytes) -> bytes:
    """Encodes a header as a literal without indexing."""
    return b"\0" + encode_integer(len(name), 7) + name + encode_integer(len(value), 7) + value


def status_fields(code: str, text: str) -> bytes:
    """Encodes `grpc-status` and `grpc-message`. An unknown status name becomes `UNKNOWN`."""
    number = STATUSES.index(code) if code in STATUSES else STATUSES.index("UNKNOWN")
    status = literal(b"grpc-status", str(number).encode())
    return status + literal(b"grpc-message", _status_message(text)) if text else status


def _status_message(text: str) -> bytes:
    """Percent-encodes the text, and truncates it because peers reject headers that are too long."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > _MAX_STATUS_TEXT:
        data = (data[:_MAX_STATUS_TEXT].decode("utf-8", "ignore") + "…").encode()
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in data).encode()


def timeout_field(seconds: float) -> bytes:
    """Encodes `grpc-timeout` in the smallest unit that needs at most 8 digits."""
    for unit, size in ((b"u", 1e-6), (b"m", 1e-3), (b"S", 1.0)):
        if (number := max(1, round(seconds / size))) < 10**8:
            return literal(b"grpc-timeout", str(number).encode() + unit)
    return literal(b"grpc-timeout", b"99999999S")
