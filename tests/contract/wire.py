"""An in-memory transport of a connection that records writes and pauses of reading."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hyperframe.frame import Frame, GoAwayFrame

from accelplane.rpc.connection import Connection

HIGH_WATER = 65536


class Wire(asyncio.Transport):
    """A transport whose other end reads all, or nothing."""

    def __init__(self, connection: Connection[Any], *, reads: bool) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.reading = True
        self._connection = connection
        self._reads = reads
        self._closing = False
        connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closing, "written after the end"
        self.written += data
        self.writes += 1
        if not self._reads and len(self.written) > HIGH_WATER:
            self._connection.pause_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    async def feed(self, chunks: Sequence[bytes]) -> None:
        """Plays bytes to the connection as an event loop does."""
        for chunk in chunks:
            if self._closing or not self.reading:
                break
            self._connection.data_received(chunk)
            await asyncio.sleep(0)

    def frames(self) -> list[Frame]:
        """All written frames. Raises for invalid data."""
        found, data = [], memoryview(self.written)
        while data:
            one, length = Frame.parse_frame_header(data[:9])
            assert len(data) >= 9 + length
            one.parse_body(data[9 : 9 + length])
            found.append(one)
            data = data[9 + length :]
        return found

    def check(self) -> None:
        """Asserts that the connection continues or has sent GOAWAY, and that its buffers are small."""
        found = self.frames()
        assert self._closing == self._connection.ended
        if self._closing:
            assert isinstance(found[-1], GoAwayFrame)
            assert found[-1].error_code
        assert len(self.written) < 4 * HIGH_WATER or self._reads
        assert sum(stream.buffered_bytes for stream in self._connection.streams.values()) < 20_000_000
