"""Parsing and encoding of HTTP/2 frames. The only state is the start of an incomplete frame.

Specification: RFC 9113, sections 3.4, 4 and 6. `connection` handles the frames.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

from accelplane.rpc.errors import Code, ConnectionFault

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Every peer accepts this size. Larger frames are neither sent nor accepted.
MAX_FRAME = 16384
DEFAULT_WINDOW = 65535
MAX_WINDOW = 2**31 - 1

Frame = tuple[int, int, int, bytes]  # type, flags, stream, payload
_HEADER = struct.Struct(">HBBBI")
_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">II")


class Setting(IntEnum):
    """Identifiers in a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class FrameReader:
    """Splits a stream of bytes into frames, after `preface`."""

    def __init__(self, preface: bytes = b"") -> None:
        self._preface = preface
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes; must be iterated to the end. Raises `ConnectionFault`."""
        if self._preface:
            data = self._after_preface(data)
        if self._rest:
            data = self._rest + data
        position, size = 0, len(data)
        while size - position >= 9:
            high, low, kind, flags, stream = _HEADER.unpack_from(data, position)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"frame of {length} bytes, expected at most {MAX_FRAME}")
            start = position + 9
            if size - start < length:
                break
            position = start + length
            yield kind, flags, stream & MAX_WINDOW, data[start:position]
        self._rest = data[position:]

    def _after_preface(self, data: bytes) -> bytes:
        expected = self._preface[: len(data)]
        if not data.startswith(expected):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "unknown connection preface, expected HTTP/2")
        self._preface = self._preface[len(expected) :]
        return data[len(expected) :]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def rst_stream(stream: int, code: Code) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: Code, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + text.encode()[:200])


def remove_padding(flags: int, payload: bytes) -> bytes:
    """Returns the payload of DATA or HEADERS without padding. Raises `ConnectionFault` for invalid padding."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "padded frame without payload")
    if payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def header_fragment(flags: int, payload: bytes) -> bytes:
    """Returns the part of a header block in a HEADERS frame, without the priority. Raises `ConnectionFault`."""
    fragment = remove_padding(flags, payload)
    if not flags & WITH_PRIORITY:
        return fragment
    if len(fragment) < 5:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "HEADERS shorter than its priority")
    return fragment[5:]


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yields identifiers, also unknown ones, and values. Raises `ConnectionFault` for an invalid value."""
    if len(payload) % 6:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, expected a multiple of 6")
    for key, value in _SETTING.iter_unpack(payload):
        if key == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"initial window of {value}, expected at most {MAX_WINDOW}")
        if key == Setting.MAX_FRAME_SIZE and not MAX_FRAME <= value < 2**24:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"maximum frame size of {value}, expected 16384 to 16777215")
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}, expected 0 or 1")
        yield key, value


def read_number(payload: bytes, what: str) -> int:
    """Returns the number in a RST_STREAM or WINDOW_UPDATE frame. Raises `ConnectionFault`."""
    if len(payload) != 4:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes, expected 4")
    (number,) = _NUMBER.unpack(payload)
    return number


def read_goaway(payload: bytes) -> tuple[int, int, str]:
    """Returns the last processed stream, the error code and the debug data. Raises `ConnectionFault`."""
    if len(payload) < 8:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes, expected at least 8")
    last, code = _GOAWAY.unpack_from(payload)
    return last & MAX_WINDOW, code, payload[8:208].decode("utf-8", "replace")
