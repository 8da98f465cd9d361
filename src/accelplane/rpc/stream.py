"""What a connection knows of one call."""

from abc import ABC, abstractmethod

from accelplane.rpc.errors import RpcError
from accelplane.rpc.messages import MessageReader


class Stream(ABC):
    """A stream of HTTP/2 that carries a call. Server and client say what is to be done with what comes."""

    __slots__ = ("after", "id", "reader", "remote_ended", "send_window", "unreturned", "unsent")

    def __init__(self, stream_id: int, send_window: int, max_message: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.unreturned = 0  # bytes of the peer's window that it has not got back
        self.remote_ended = False
        self.reader = MessageReader(max_message)
        self.unsent = memoryview(b"")
        self.after = b""  # frames that follow what is unsent

    @property
    def kept(self) -> int:
        """How many bytes are in memory for it."""
        return self.reader.pending + len(self.unsent)

    @property
    def takes_more(self) -> bool:
        """Whether the peer may send more than a window."""
        return True

    @abstractmethod
    def took(self, messages: list[bytes]) -> None:
        """Messages have come; the last ones, when `remote_ended`."""

    @abstractmethod
    def sent(self) -> None:
        """All that was unsent is sent."""

    @abstractmethod
    def fail(self, error: RpcError) -> None:
        """What the peer sent cannot be taken."""

    @abstractmethod
    def lost(self, error: RpcError) -> None:
        """The stream is over for the connection, which has forgotten it."""
