"""The history of health changes for pages and metrics."""

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
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


class HealthHistory:
    """The history of the units of one plugin. It ends with the unit; the counters of the plugin do not."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[Cause] = Counter()
        self._clock = clock
        # By unit: the last changes, since when it is unhealthy, and for how long it was before.
        self._changes: defaultdict[str, deque[HealthChange]] = defaultdict(lambda: deque(maxlen=_MAX_CHANGES))
        self._unhealthy_since: dict[str, float] = {}
        self._unhealthy_before: defaultdict[str, float] = defaultdict(float)
        self._recoveries = [0] * (len(RECOVERY_BOUNDS) + 1)
        self._recovery_seconds = 0.0

    def record(self, unit: str, old: HealthState | None, new: HealthState) -> None:
        """Records the state after a check; `old` is None for a new unit."""
        if old is not None and old.phase is new.phase:
            return
        now = self._clock()
        self._changes[unit].append(HealthChange(time.time(), new.phase, new.cause, new.reason))
        if new.phase is Phase.UNHEALTHY:
            self._unhealthy_since.setdefault(unit, now)
            if old is None or old.usable:
                self.failures[new.cause] += 1
        elif new.usable and unit in self._unhealthy_since:
            seconds = now - self._unhealthy_since.pop(unit)
            self._unhealthy_before[unit] += seconds
            self._recoveries[bisect_left(RECOVERY_BOUNDS, seconds)] += 1
            self._recovery_seconds += seconds

    def forget(self, unit: str) -> None:
        for by_unit in (self._changes, self._unhealthy_since, self._unhealthy_before):
            by_unit.pop(unit, None)

    def changes(self, unit: str) -> tuple[HealthChange, ...]:
        """The last changes of a unit, oldest first."""
        return tuple(self._changes.get(unit, ()))

    def unhealthy_seconds(self, unit: str) -> float:
        """The time that the unit has been unhealthy, with the present period."""
        since = self._unhealthy_since.get(unit)
        present = self._clock() - since if since is not None else 0.0
        return self._unhealthy_before.get(unit, 0.0) + present

    @property
    def recoveries(self) -> Recoveries:
        return Recoveries(tuple(self._recoveries), self._recovery_seconds)
