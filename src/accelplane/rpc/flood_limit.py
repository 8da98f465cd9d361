"""The limit on frames that cost work and carry no request: pings, settings, resets, empty data.

Correct peers send some: grpc-go sends a ping and window updates for the data it receives, and a cancelled call sends a
reset. So data that is sent refills the credit, and time does; a peer that floods gets neither.
"""

import time

from accelplane.rpc.errors import Code, ConnectionFault

_MAX_CREDIT = 1000
_CREDIT_PER_SECOND = 100
_CREDIT_PER_DATA_FRAME = 10


class FloodLimit:
    """The frames that a connection may still receive."""

    def __init__(self) -> None:
        self._credit = _MAX_CREDIT
        self._refilled_at = time.monotonic()

    def refill(self) -> None:
        """Adds credit for a DATA frame that is sent."""
        self._credit = min(_MAX_CREDIT, self._credit + _CREDIT_PER_DATA_FRAME)

    def consume(self) -> None:
        """Takes the credit of one frame. Raises `ConnectionFault` if there is none."""
        if self._credit <= 0:
            # Only here, so that the clock isn't read for each frame.
            now = time.monotonic()
            self._credit = min(_MAX_CREDIT, int((now - self._refilled_at) * _CREDIT_PER_SECOND))
            self._refilled_at = now
            if self._credit <= 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames without data")
        self._credit -= 1
