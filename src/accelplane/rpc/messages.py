"""gRPC's messages in a stream of bytes: each has a flag and its length in front."""

import struct

from accelplane.rpc.errors import RpcError

MAX_MESSAGE = 4 * 1024 * 1024  # gRPC's default
_HEAD = struct.Struct(">BI")


def framed(message: bytes) -> bytes:
    return _HEAD.pack(0, len(message)) + message


class MessageReader:
    """Makes messages of at most `limit` bytes from what DATA frames hold."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished message are kept."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises `RpcError` as soon as one is compressed or longer than allowed."""
        rest = self._rest
        rest += data
        found: list[bytes] = []
        position = 0
        while len(rest) - position >= 5:
            compressed, length = _HEAD.unpack_from(rest, position)
            if compressed:
                raise RpcError("UNIMPLEMENTED", "compressed messages are not understood")
            if length > self._limit:
                raise RpcError("RESOURCE_EXHAUSTED", f"a message of {length} bytes, at most {self._limit} are taken")
            end = position + 5 + length
            if end > len(rest):
                break
            found.append(bytes(rest[position + 5 : end]))
            position = end
        del rest[:position]
        return found
