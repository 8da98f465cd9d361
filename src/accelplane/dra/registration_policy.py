"""Decides when a driver must create its registration socket again. Pure; times are monotonic seconds.

Two reasons: the kubelet has rejected the registration, or the kubelet's connection to the service socket was lost and
does not return. Kubelet behaviour: until 1.35 a rejected socket is not tried again, from 1.36 it is tried with backoff.
From 1.34 the kubelet keeps a connection open, and deletes the driver's slices 30 s after it was lost; 1.34.0 and 1.34.1
lose it for good after 30 minutes without a call. 1.33 connects only for calls, and 1.32 deletes the slices of a driver
whose registration socket is removed.
"""

FIRST_RETRY, LAST_RETRY = 1.0, 120.0
CONNECTION_TIMEOUT = 5.0
MIN_CONNECTION = 1.0  # shorter ones are of programs that check whether the socket is in use
FIRST_RECREATE, LAST_RECREATE = 30.0, 300.0

Version = tuple[int, int]


class RegistrationPolicy:
    """Of one driver at one kubelet."""

    def __init__(self) -> None:
        self._accepted = False
        self._retry = FIRST_RETRY
        self._retry_at: float | None = None  # after a rejection
        self._connected_at: float | None = None
        self._lost_at: float | None = None
        self._lost_before: float | None = None  # `_lost_at` when the present connection began
        self._recreate_interval = FIRST_RECREATE
        self._recreate_after = 0.0

    def record_status(self, now: float, *, accepted: bool, version: Version | None) -> None:
        """The kubelet has called NotifyRegistrationStatus."""
        self._accepted = accepted
        self._lost_at = self._lost_before = None
        if accepted:
            self._retry, self._retry_at = FIRST_RETRY, None
            self._recreate_interval = FIRST_RECREATE
        elif version is None or version < (1, 36):
            self._retry_at = now + self._retry
            self._retry = min(2 * self._retry, LAST_RETRY)

    def observe_connections(self, now: float, count: int) -> None:
        """The number of connections at the service socket may have changed."""
        if count and self._connected_at is None:
            self._connected_at, self._lost_before, self._lost_at = now, self._lost_at, None
        elif not count and self._connected_at is not None:
            self._lost_at = now if now - self._connected_at >= MIN_CONNECTION else self._lost_before
            self._connected_at = None

    def is_registered(self, version: Version | None) -> bool:
        """Whether the kubelet has accepted the registration and has not lost the connection since."""
        return self._accepted and not (self._guards(version) and self._lost_at is not None)

    def should_recreate(self, now: float, version: Version | None) -> bool:
        """Whether to create the registration socket again. The caller does so and calls `record_created`."""
        if self._retry_at is not None and now >= self._retry_at:
            return True
        if self._lost_at is None or not self._guards(version):
            return False
        return now >= max(self._lost_at + CONNECTION_TIMEOUT, self._recreate_after)

    def record_created(self, now: float, *, again: bool) -> None:
        """The registration socket is created, `again` because of `should_recreate`."""
        self._accepted = False
        self._retry_at = None
        if again:
            self._recreate_after = now + self._recreate_interval
            self._recreate_interval = min(2 * self._recreate_interval, LAST_RECREATE)

    def next_check(self, now: float, version: Version | None) -> float | None:
        """Seconds after which `should_recreate` can be true, None if only an event can change it."""
        due: list[float] = [] if self._retry_at is None else [self._retry_at]
        if self._lost_at is not None and self._guards(version):
            due.append(max(self._lost_at + CONNECTION_TIMEOUT, self._recreate_after))
        return max(0.0, min(due) - now) if due else None

    @staticmethod
    def _guards(version: Version | None) -> bool:
        return version is None or version >= (1, 34)
