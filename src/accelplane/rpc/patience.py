"""How much a connection bears of frames that cost work and bring nothing: pings, settings, resets, empty data.

Honest peers send some: grpc-go a ping and window updates for what it receives, a cancelled call its reset. So credit
comes with all data that we send, and some with time; who floods has neither.
"""

import time

from accelplane.rpc.errors import Code, ConnectionFault

_MOST = 1000
_A_SECOND = 100
_FOR_WORK = 10


class Patience:
    """A credit of frames."""

    def __init__(self) -> None:
        self._credit = _MOST
        self._filled = time.monotonic()

    def earn(self) -> None:
        """For data that was sent: a call is answered."""
        self._credit = min(_MOST, self._credit + _FOR_WORK)

    def spend(self) -> None:
        """For a frame that brings nothing. Raises `ConnectionFault` when there were too many."""
        if self._credit <= 0:
            # Looked up only here: no clock is read while a peer behaves.
            now = time.monotonic()
            self._credit = min(_MOST, int((now - self._filled) * _A_SECOND))
            self._filled = now
            if self._credit <= 0:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that bring nothing")
        self._credit -= 1
