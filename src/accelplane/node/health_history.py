"""The history of health changes for pages and metrics."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from accelplane.devices import Cause, HealthState, Phase

# Upper bounds in seconds of the histogram of recovery times.
RECOVERY_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_MAX_CHANGES = 32


class HealthChange(Struct, frozen=True):
    """A unit entered `phase` at the Unix time `time`, for the reason given."""

    time: float
    phase: Phase
    cause: Cause = "other"
    reason: str = ""


class Recoveries(Struct, frozen=True):
    """Recovery times: one count for each of `RECOVERY_BOUNDS` and one for longer ones, not cumulative, and the sum."""

    counts: Sequence[int] = (0,) * (len(RECOVERY_BOUNDS) + 1)
    seconds: float = 0.0


class _Unit:
    """`unhealthy_since` is the monotonic time at which the unit became unhealthy, None while it is not."""

    def __init__(self) -> None:
        self.changes: deque[HealthChange] = deque(maxlen=_MAX_CHANGES)
        self.unhealthy_since: float | None = None
        self.unhealthy_before = 0.0


class HealthHistory:
    """The history of the units of one plugin. It ends with the unit; the counters of the plugin do not."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[Cause] = Counter()
        self._clock = clock
        self._units: dict[str, _Unit] = {}
        self._recoveries = [0] * (len(RECOVERY_BOUNDS) + 1)
        self._recovery_seconds = 0.0

    def record(self, unit: str, old: HealthState | None, new: HealthState) -> None:
        """Records the state after a check; `old` is None for a new unit."""
        if old is not None and old.phase is new.phase:
            return
        now = self._clock()
        known = self._units.setdefault(unit, _Unit())
        known.changes.append(HealthChange(time.time(), new.phase, new.cause, new.reason))
        if new.phase is Phase.UNHEALTHY and known.unhealthy_since is None:
            known.unhealthy_since = now
        if new.phase is Phase.UNHEALTHY and (old is None or old.usable):
            self.failures[new.cause] += 1
        if new.usable and known.unhealthy_since is not None:
            seconds = now - known.unhealthy_since
            known.unhealthy_since = None
            known.unhealthy_before += seconds
            self._recoveries[bisect_left(RECOVERY_BOUNDS, seconds)] += 1
            self._recovery_seconds += seconds

    def forget(self, unit: str) -> None:
        self._units.pop(unit, None)

    def changes(self, unit: str) -> tuple[HealthChange, ...]:
        """The last changes of a unit, oldest first."""
        known = self._units.get(unit)
        return tuple(known.changes) if known else ()

    def unhealthy_seconds(self, unit: str) -> float:
        """The time that the unit has been unhealthy, with the present period."""
        known = self._units.get(unit)
        if known is None:
            return 0.0
        present = self._clock() - known.unhealthy_since if known.unhealthy_since is not None else 0.0
        return known.unhealthy_before + present

    @property
    def recoveries(self) -> Recoveries:
        return Recoveries(tuple(self._recoveries), self._recovery_seconds)
