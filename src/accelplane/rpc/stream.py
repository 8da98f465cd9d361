"""The state of a stream that client and server share."""

from abc import ABC, abstractmethod

from accelplane.rpc.errors import RpcError
from accelplane.rpc.messages import MessageReader


class Stream(ABC):
    """An HTTP/2 stream that carries a call. Server and client implement the event methods."""

    __slots__ = ("id", "reader", "remote_ended", "send_window", "trailing_frames", "unacked_bytes", "unsent")

    def __init__(self, stream_id: int, send_window: int, max_message: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.unacked_bytes = 0  # received, and not yet acknowledged by a WINDOW_UPDATE
        self.remote_ended = False
        self.reader = MessageReader(max_message)
        self.unsent = memoryview(b"")
        self.trailing_frames = b""  # sent after `unsent`

    @property
    def buffered_bytes(self) -> int:
        """The size of the stream's data in memory."""
        return self.reader.pending + len(self.unsent)

    @property
    def accepts_data(self) -> bool:
        """Whether the peer gets a WINDOW_UPDATE for data that it sent."""
        return True

    @abstractmethod
    def on_messages(self, messages: list[bytes]) -> None:
        """Messages were received; the last ones if `remote_ended`."""

    @abstractmethod
    def on_sent(self) -> None:
        """All of `unsent` is sent."""

    @abstractmethod
    def fail(self, error: RpcError) -> None:
        """Ends the call because received data is invalid."""

    @abstractmethod
    def on_closed(self, error: RpcError) -> None:
        """The stream was reset, or its connection ended; the connection has removed it."""
