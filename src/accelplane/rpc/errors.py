"""Errors: `RpcError` for callers of a method; below it HTTP/2's errors of a stream and of a connection."""

from enum import IntEnum

# Indexed by the number in grpc-status.
STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip


class Code(IntEnum):
    """Error codes of HTTP/2 (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


_RESETS: dict[int, str] = {
    Code.REFUSED_STREAM: "UNAVAILABLE",
    Code.CANCEL: "CANCELLED",
    Code.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
}


class RpcError(Exception):
    """A call failed: `code` is the name of gRPC's status code (`UNAVAILABLE`), `text` the status message."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class _Fault(Exception):
    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class ConnectionFault(_Fault):
    """A connection error (RFC 9113, section 5.4.1): GOAWAY is sent, and the connection ends."""


class StreamFault(_Fault):
    """A stream error (RFC 9113, section 5.4.2): the stream is reset, and the connection stays open."""


def code_name(code: int) -> str:
    """Returns the name of an HTTP/2 error code, or its number if it is unknown."""
    try:
        return Code(code).name
    except ValueError:
        return f"error {code}"


def reset_error(code: int) -> RpcError:
    """Returns the error of a call whose stream the peer reset."""
    return RpcError(_RESETS.get(code, "INTERNAL"), f"stream reset: {code_name(code)}")
