"""Requests in the bytes that a server receives: heads and bodies, independent of how the bytes are split."""

from collections.abc import Callable

from accelplane.http.messages import END_OF_HEAD, Head, HttpError


class RequestReader:
    """The received bytes of one client, which are not read yet, and the head of its current request.

    The current request begins with `read_head` and ends with `finish`, when its response is sent.
    """

    __slots__ = ("_head_limit", "_parse_head", "head", "received")

    def __init__(self, parse_head: Callable[[bytes], Head], head_limit: int) -> None:
        """`parse_head` raises `HttpError`, as does a head of more than `head_limit` bytes."""
        self.received = bytearray()
        self.head: Head | None = None
        self._parse_head = parse_head
        self._head_limit = head_limit

    @property
    def started(self) -> bool:
        """Whether a request is received or answered."""
        return bool(self.received) or self.head is not None

    def read_head(self) -> Head | None:
        """Reads the head of the next request; None until it is complete. Raises `HttpError`."""
        end = self.received.find(END_OF_HEAD, 0, self._head_limit + len(END_OF_HEAD))
        if end < 0:
            if len(self.received) > self._head_limit:
                raise HttpError(431, f"expected a head of at most {self._head_limit} bytes")
            return None
        head = self.head = self._parse_head(bytes(self.received[:end]))
        del self.received[: end + len(END_OF_HEAD)]
        return head

    def read_body(self, length: int) -> bytearray | None:
        """Reads the body of the current request; None until it is complete."""
        if len(self.received) < length:
            return None
        if len(self.received) == length:
            body, self.received = self.received, bytearray()  # not copied: it may be most of the process's memory
        else:
            body = self.received[:length]
            del self.received[:length]
        return body

    def finish(self) -> None:
        """Ends the current request. Bytes of the next one remain."""
        self.head = None

    def clear(self) -> None:
        """Drops the received bytes."""
        self.received = bytearray()
