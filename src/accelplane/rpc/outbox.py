"""The sending half of a connection: what goes out at once, what waits for a window, and whether the peer reads."""

import asyncio

from accelplane.rpc import frames
from accelplane.rpc.errors import Code, ConnectionFault
from accelplane.rpc.frames import DEFAULT_WINDOW, MAX_FRAME, MAX_WINDOW
from accelplane.rpc.patience import Patience
from accelplane.rpc.stream import Stream

_CHUNK = 65536  # so much is written before a look at whether the peer reads


class Outbox:
    """Frames on their way to the peer. Between `hold` and `release` they are collected, for one write."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._transport: asyncio.Transport | None = None
        self._window = DEFAULT_WINDOW
        self._waiting: dict[int, Stream] = {}  # those with something unsent
        self._frames: list[bytes] = []
        self._size = 0
        self._held = False
        self.write_paused = False
        self._closed = False

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def close(self, *, now: bool = False) -> None:
        """Nothing goes out after what was written; not even that if `now`."""
        self._closed = True
        self._frames.clear()
        self._waiting.clear()
        if self._transport is not None:
            if now:
                self._transport.abort()
            else:
                self._transport.close()

    def closed(self) -> None:
        """The transport is gone, and stands no more calls."""
        self._transport = None

    def pause(self) -> None:
        """The peer does not read. So nothing is read from it either, or the answers to it would fill the memory."""
        self.write_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self.write_paused = False
        if self._transport is not None:
            self._transport.resume_reading()
        self.send_waiting()

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self.flush()

    def flush(self) -> None:
        if self._frames and self._transport is not None and not self._closed:
            data = b"".join(self._frames)
            self._frames.clear()
            self._size = 0
            self._transport.write(data)

    def write(self, data: bytes) -> None:
        """Sends frames that no window counts, in the order of the calls."""
        if self._closed:
            return
        self._frames.append(data)
        self._size += len(data)
        if not self._held or self._size >= _CHUNK:
            self.flush()

    def send(self, stream: Stream, data: bytes, *, before: bytes = b"", after: bytes = b"") -> bool:
        """Sends data between other frames, as the windows allow. Whether all is sent; else `stream.sent` is called."""
        size = len(data)
        if size <= MAX_FRAME and size <= stream.send_window and size <= self._window and not self.write_paused:
            stream.send_window -= size
            self._window -= size
            self._patience.earn()
            self.write(before + frames.frame(frames.DATA, 0, stream.id, data) + after)
            return True
        if before:
            self.write(before)
        stream.unsent, stream.after = memoryview(data), after
        self._waiting[stream.id] = stream
        self.send_waiting()
        return False

    def drop(self, stream: Stream) -> None:
        """Forgets what is unsent."""
        if self._waiting.pop(stream.id, None) is not None:
            stream.unsent = memoryview(b"")

    def widen(self, increment: int) -> None:
        """The peer takes more on the connection. Raises `ConnectionFault`."""
        self._window += increment
        if self._window > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"a window of {self._window}")
        self.send_waiting()

    def send_waiting(self) -> None:
        """A frame of each stream that waits, in turns, until windows are exhausted or the peer does not read."""
        if not self._waiting:
            return
        held, self._held = self._held, True
        while sum(self._send_part(stream) for stream in tuple(self._waiting.values())):
            pass
        if not held:
            self.release()

    def _send_part(self, stream: Stream) -> bool:
        size = min(len(stream.unsent), stream.send_window, self._window, MAX_FRAME)
        if size <= 0 or self.write_paused:
            return False
        stream.send_window -= size
        self._window -= size
        self._patience.earn()
        part, stream.unsent = bytes(stream.unsent[:size]), stream.unsent[size:]
        self.write(frames.frame(frames.DATA, 0, stream.id, part))
        if not stream.unsent:
            del self._waiting[stream.id]
            self.write(stream.after)
            stream.sent()
        return True
