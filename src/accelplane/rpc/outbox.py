"""The sending half of a connection: writes frames, and queues data that exceeds a window or a paused transport."""

import asyncio

from accelplane.rpc import frames
from accelplane.rpc.errors import Code, ConnectionFault
from accelplane.rpc.flood_limit import FloodLimit
from accelplane.rpc.frames import DEFAULT_WINDOW, MAX_FRAME, MAX_WINDOW
from accelplane.rpc.stream import Stream

_CHUNK = 65536  # collected frames are written at this size, so that the transport can pause writing


class Outbox:
    """Frames to send. Between `cork` and `uncork` they are collected for one write."""

    def __init__(self, flood_limit: FloodLimit) -> None:
        self.write_paused = False
        self._flood_limit = flood_limit
        self.transport: asyncio.Transport | None = None  # None before and after the connection
        self._window = DEFAULT_WINDOW
        self._pending: dict[int, Stream] = {}  # streams with unsent data
        self._frames: list[bytes] = []
        self._size = 0
        self._corked = False
        self._closed = False

    def close(self, *, now: bool = False) -> None:
        """Discards all further frames. Closes the transport, which first sends buffered data unless `now`."""
        self._closed = True
        self._frames.clear()
        self._pending.clear()
        if self.transport is not None:
            if now:
                self.transport.abort()
            else:
                self.transport.close()

    def pause(self) -> None:
        """Pauses writing because the peer does not read. Pauses reading too, which limits the replies in memory."""
        self.write_paused = True
        self.pause_reading()

    def resume(self) -> None:
        self.write_paused = False
        self.resume_reading()
        self.send_pending()

    def pause_reading(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.write_paused:
            self.transport.resume_reading()

    def cork(self) -> None:
        self._corked = True

    def uncork(self) -> None:
        self._corked = False
        self.flush()

    def flush(self) -> None:
        if self._frames and self.transport is not None and not self._closed:
            data = b"".join(self._frames)
            self._frames.clear()
            self._size = 0
            self.transport.write(data)

    def write(self, data: bytes) -> None:
        """Sends frames that no window limits, in the order of the calls."""
        if self._closed:
            return
        self._frames.append(data)
        self._size += len(data)
        if not self._corked or self._size >= _CHUNK:
            self.flush()

    def send(self, stream: Stream, data: bytes, *, before: bytes = b"", after: bytes = b"") -> bool:
        """Sends data between other frames, within the windows. Returns False if some is left for `stream.on_sent`."""
        size = len(data)
        if size <= MAX_FRAME and size <= stream.send_window and size <= self._window and not self.write_paused:
            stream.send_window -= size
            self._window -= size
            self._flood_limit.refill()
            self.write(before + frames.frame(frames.DATA, 0, stream.id, data) + after)
            return True
        if before:
            self.write(before)
        stream.unsent, stream.trailing_frames = memoryview(data), after
        self._pending[stream.id] = stream
        self.send_pending()
        return False

    def drop(self, stream: Stream) -> None:
        """Discards the stream's unsent data."""
        if self._pending.pop(stream.id, None) is not None:
            stream.unsent = memoryview(b"")

    def enlarge_window(self, increment: int) -> None:
        """Enlarges the connection's send window. Raises `ConnectionFault`."""
        self._window += increment
        if self._window > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"window of {self._window}, expected at most {MAX_WINDOW}")
        self.send_pending()

    def send_pending(self) -> None:
        """Sends one frame of each stream in turn, until the windows are used up or writing is paused."""
        if not self._pending:
            return
        corked, self._corked = self._corked, True
        while sum(self._send_part(stream) for stream in tuple(self._pending.values())):
            pass
        if not corked:
            self.uncork()

    def _send_part(self, stream: Stream) -> bool:
        size = min(len(stream.unsent), stream.send_window, self._window, MAX_FRAME)
        if size <= 0 or self.write_paused:
            return False
        stream.send_window -= size
        self._window -= size
        self._flood_limit.refill()
        part, stream.unsent = bytes(stream.unsent[:size]), stream.unsent[size:]
        self.write(frames.frame(frames.DATA, 0, stream.id, part))
        if not stream.unsent:
            del self._pending[stream.id]
            self.write(stream.trailing_frames)
            stream.on_sent()
        return True
