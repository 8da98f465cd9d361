"""The deadline of a server connection, and whether its client is fast enough."""

import math
import time

# Under pressure, a client has to send its request, and to take its response, at this rate (bytes/s).
_MIN_RATE = 256 * 1024


class Progress:
    """The time that a client has for what it does now, and what it has transferred meanwhile."""

    __slots__ = ("_progress_at", "_transferred", "deadline", "started_at")

    def __init__(self, timeout: float) -> None:
        self.start(timeout)

    def start(self, timeout: float) -> None:
        """Begins something that has to end within `timeout`: a handshake, a request, a response or the next wait."""
        self.started_at = self._progress_at = time.monotonic()
        self._transferred = 0
        self.deadline = self.started_at + timeout

    def add(self, size: int) -> None:
        """The client has sent or taken `size` bytes."""
        self._progress_at = time.monotonic()
        self._transferred += size

    def suspend_deadline(self) -> None:
        """For a stream, which may last for any time while its client takes what is sent."""
        self.deadline = math.inf

    @property
    def silent_since(self) -> float:
        """The last progress. A client that is slower than the minimum rate is silent since it fell behind the rate."""
        return min(self._progress_at, self.started_at + self._transferred / _MIN_RATE)
