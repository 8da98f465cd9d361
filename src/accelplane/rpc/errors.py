"""What can go wrong: for the caller of a method one error, below it HTTP/2's two, of a stream and of a connection."""

from enum import IntEnum

# By number, as grpc-status says them.
STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip


class Code(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

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
    """A call failed: `code` is gRPC's name of the status (`UNAVAILABLE`), the text what the other side said of it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class ConnectionFault(Exception):
    """The peer broke a rule that a connection stands on: it is told in a GOAWAY, and the connection ends."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class StreamFault(Exception):
    """The peer broke a rule in one stream, which is reset; the connection goes on."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code


def named(code: int) -> str:
    """HTTP/2's name of an error code, or its number."""
    try:
        return Code(code).name
    except ValueError:
        return f"error {code}"


def reset_error(code: int) -> RpcError:
    """What a call comes to whose stream was reset."""
    return RpcError(_RESETS.get(code, "INTERNAL"), f"stream reset: {named(code)}")
