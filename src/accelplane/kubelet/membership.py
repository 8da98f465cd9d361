"""When a resource is to be registered: told what is there, it says what is due. Pure; times are monotonic seconds.

A refused registration is repeated with growing pauses, at once when the kubelet has another socket. A registration
that the kubelet does not follow up with a stream, or whose stream has ended, is made again; a kubelet that ends every
stream at once is given time.
"""

import random

from accelplane.kubelet.sockets import Identity

FIRST_RETRY, LAST_RETRY = 0.2, 10.0
STREAM_DEADLINE, LAST_STREAM_DEADLINE = 10.0, 300.0
LOOK_AT_LEAST = 30.0  # without inotify this is how a lost socket is found


class Membership:
    """Of one resource at one kubelet, for one life of the resource's own socket."""

    def __init__(self) -> None:
        self.registered = False
        self.refusals = 0  # in a row, at the kubelet's present socket
        self._kubelet: Identity | None = None
        self._joined: Identity | None = None
        self._tried: Identity | None = None
        self._retry = FIRST_RETRY
        self._retry_at = 0.0
        self._joined_at = 0.0
        self._listening = False
        self._stream_deadline = STREAM_DEADLINE
        self._stream_due = 0.0

    def see(self, kubelet: Identity | None, *, listening: bool, now: float) -> bool:
        """Takes in whose socket the kubelet's is, and whether a stream is open.

        Whether the kubelet was found just now to have stopped listening.
        """
        if kubelet != self._tried:
            self._retry, self._retry_at = FIRST_RETRY, now
            self.refusals = 0
        self._kubelet, self._listening = kubelet, listening
        if not self.registered:
            return False
        if listening:
            self._stream_deadline, self._stream_due = STREAM_DEADLINE, now
            return False
        if now < self._stream_due:
            return False
        self.registered = False
        if now - self._joined_at >= STREAM_DEADLINE:
            self._retry, self._retry_at = FIRST_RETRY, now
        else:
            self._pause(now)
        return True

    @property
    def moved(self) -> bool:
        """Whether the kubelet's socket is another than that at which the resource was registered."""
        return self._joined is not None and self._kubelet not in (None, self._joined)

    def due(self, now: float) -> bool:
        """Whether to register now; what comes of it is told to `tried`."""
        return not self.registered and self._kubelet is not None and now >= self._retry_at

    def tried(self, now: float, *, accepted: bool) -> None:
        """Takes in the outcome of a registration at the socket seen last."""
        self._tried = self._kubelet
        self.registered = accepted
        if not accepted:
            self.refusals += 1
            self._pause(now)
            return
        self.refusals = 0
        self._joined, self._joined_at = self._kubelet, now
        self._stream_due = now + self._stream_deadline
        self._stream_deadline = min(2 * self._stream_deadline, LAST_STREAM_DEADLINE)

    def next_look(self, now: float) -> float:
        """Seconds after which to look again though nothing has happened."""
        if not self.registered and self._kubelet is not None:
            wait = self._retry_at - now
        elif self.registered and not self._listening:
            wait = self._stream_due - now
        else:
            wait = LOOK_AT_LEAST
        return min(max(0.0, wait), LOOK_AT_LEAST)

    def _pause(self, now: float) -> None:
        # Not all resources of a node at the same moment.
        self._retry_at = now + self._retry * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        self._retry = min(2 * self._retry, LAST_RETRY)
