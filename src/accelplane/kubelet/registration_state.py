"""Decides when a resource must be registered. Pure; times are monotonic seconds.

A rejected registration is retried with exponential backoff, immediately if the kubelet has a new socket. A registration
that no stream follows is repeated after a deadline, one whose stream has ended immediately. A kubelet that ends every
stream right away is retried with backoff.
"""

import random

from accelplane.kubelet.sockets import Identity

FIRST_RETRY, LAST_RETRY = 0.2, 10.0
STREAM_DEADLINE, LAST_STREAM_DEADLINE = 10.0, 300.0
MAX_CHECK_INTERVAL = 30.0  # without inotify a lost socket is found by this timer


class RegistrationState:
    """Of one resource at one kubelet, for one lifetime of the resource's own socket."""

    def __init__(self) -> None:
        self.registered = False
        self.rejections = 0  # in a row, at the kubelet's present socket
        self._kubelet: Identity | None = None
        self._registered_at_socket: Identity | None = None
        self._attempted: Identity | None = None
        self._retry = FIRST_RETRY
        self._retry_at = 0.0
        self._registered_at = 0.0
        self._opened = 0
        self._opened_before_attempt = 0
        self._watching = False
        self._stream_timeout = STREAM_DEADLINE
        self._stream_deadline = 0.0

    def observe(self, kubelet: Identity | None, *, open_streams: int, opened: int, now: float) -> bool:
        """Records the kubelet's socket, the number of open streams and how many were ever `opened`.

        Returns whether the registration has just become invalid because the kubelet does not watch.
        """
        if kubelet != self._attempted:
            self._retry, self._retry_at = FIRST_RETRY, now
            self.rejections = 0
        self._kubelet, self._opened, self._watching = kubelet, opened, open_streams > 0
        if not self.registered:
            return False
        if self._watching:
            self._stream_timeout = STREAM_DEADLINE
            self._opened_before_attempt = -1  # a stream was open: its end is the end of the registration
            return False
        # A stream may open and end before Register is answered. It counts as ended, not as missing.
        if opened == self._opened_before_attempt and now < self._stream_deadline:
            return False
        self.registered = False
        if now - self._registered_at >= STREAM_DEADLINE:
            self._retry, self._retry_at = FIRST_RETRY, now
        else:
            self._back_off(now)
        return True

    @property
    def moved(self) -> bool:
        """Whether the kubelet has another socket than the one at which the resource was registered."""
        return self._registered_at_socket is not None and self._kubelet not in (None, self._registered_at_socket)

    def should_register(self, now: float) -> bool:
        """Whether to register now; the outcome is reported to `record_attempt`."""
        return not self.registered and self._kubelet is not None and now >= self._retry_at

    def record_attempt(self, now: float, *, accepted: bool) -> None:
        """Records the outcome of a registration that was sent after the last `observe`."""
        self._attempted = self._kubelet
        self.registered = accepted
        if not accepted:
            self.rejections += 1
            self._back_off(now)
            return
        self.rejections = 0
        self._registered_at_socket, self._registered_at = self._kubelet, now
        self._opened_before_attempt = self._opened
        self._stream_deadline = now + self._stream_timeout
        self._stream_timeout = min(2 * self._stream_timeout, LAST_STREAM_DEADLINE)

    def next_check(self, now: float) -> float:
        """Seconds after which to call `observe` again if nothing happens."""
        if not self.registered and self._kubelet is not None:
            wait = self._retry_at - now
        elif self.registered and not self._watching:
            wait = self._stream_deadline - now
        else:
            wait = MAX_CHECK_INTERVAL
        return min(max(0.0, wait), MAX_CHECK_INTERVAL)

    def _back_off(self, now: float) -> None:
        # Jitter: the resources of a node do not retry at the same moment.
        self._retry_at = now + self._retry * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        self._retry = min(2 * self._retry, LAST_RETRY)
