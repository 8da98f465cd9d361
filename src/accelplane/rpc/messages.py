"""gRPC's message framing: a flag and the length precede each message in a stream of bytes."""

import struct

from accelplane.rpc.errors import RpcError

MAX_MESSAGE = 4 * 1024 * 1024  # gRPC's default
_HEAD = struct.Struct(">BI")


def frame_message(message: bytes) -> bytes:
    return _HEAD.pack(0, len(message)) + message


class MessageReader:
    """Splits the content of DATA frames into messages of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()

    @property
    def pending(self) -> int:
        """The number of buffered bytes of an incomplete message."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages that `data` completes. Raises `RpcError` for a compressed message or one too long."""
        rest = self._rest
        rest += data
        found: list[bytes] = []
        position = 0
        while len(rest) - position >= 5:
            compressed, length = _HEAD.unpack_from(rest, position)
            if compressed:
                raise RpcError("UNIMPLEMENTED", "compressed messages are not supported")
            if length > self._limit:
                raise RpcError("RESOURCE_EXHAUSTED", f"message of {length} bytes, expected at most {self._limit}")
            end = position + 5 + length
            if end > len(rest):
                break
            found.append(bytes(rest[position + 5 : end]))
            position = end
        del rest[:position]
        return found
