"""Backoff for corrections that another client reverts.

Two programs that both correct a field would write as fast as the API server answers. `DriftBackoff` remembers the
corrections of each object: the first correction of a field is immediate, the next ones follow after doubling delays.
A field that has been corrected `CONFLICT` times is a field conflict, which is worth a condition.

A change of the desired object is not drift: all its differences are corrected immediately.
"""

from collections.abc import Callable, Sequence

import msgspec

from accelplane.apiserver.clock import loop_time

from .differences import Difference, Path
from .objects import Request

CONFLICT = 3
"""Corrections of a field after which it is a conflict."""


class FieldConflict(msgspec.Struct, frozen=True):
    """A field that was corrected several times, and the managers that set it otherwise, as far as they are known."""

    difference: Difference
    corrections: int
    managers: tuple[str, ...]

    def __str__(self) -> str:
        managers = f" by {', '.join(self.managers)}" if self.managers else ""
        return (
            f"{self.difference}: changed{managers} after {self.corrections} corrections; "
            "remove the field from the configuration of the other program"
        )


class _Object(msgspec.Struct):
    """The history of one object. `persistent`: differences that a write did not remove, and the time of a retry."""

    desired: str
    corrected: dict[Path, tuple[FieldConflict, float]] = {}
    persistent: tuple[tuple[Difference, ...], float] = ((), 0.0)


class DriftBackoff:
    """The corrections of the objects of one kind.

    Delays double from `first_delay` to `max_delay` seconds. Fields without a correction for
    `period` seconds are forgotten.
    """

    def __init__(
        self,
        *,
        first_delay: float = 1.0,
        max_delay: float = 300.0,
        period: float = 600.0,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._period = period
        self._clock = clock
        self._objects: dict[Request, _Object] = {}

    def delay(self, key: Request, desired: str, found: Sequence[Difference]) -> float:
        """The seconds until these differences may be corrected. `desired` is the hash of the desired object."""
        history = self._current(key)
        if history is None or history.desired != desired:
            return 0.0
        now = self._clock()
        corrected = [history.corrected[each.path] for each in found if each.path in history.corrected]
        return max([0.0, *(at + self._delay(conflict.corrections) - now for conflict, at in corrected)])

    def is_persistent(self, key: Request, desired: str, found: Sequence[Difference]) -> bool:
        """Whether a recent write left exactly these differences in place."""
        history = self._objects.get(key)
        if history is None or history.desired != desired:
            return False
        persistent, until = history.persistent
        return persistent == tuple(found) and self._clock() < until

    def record_correction(
        self, key: Request, desired: str, found: Sequence[Difference], managers: Callable[[Difference], tuple[str, ...]]
    ) -> None:
        """Counts a correction. `managers` returns the managers of a field."""
        history = self._of(key, desired)
        now = self._clock()
        for each in found:
            before = history.corrected.get(each.path)
            count = 1 + (before[0].corrections if before else 0)
            history.corrected[each.path] = (FieldConflict(each, count, managers(each)), now)

    def record_persistent(self, key: Request, desired: str, found: Sequence[Difference]) -> None:
        """Records that a write left these differences in place."""
        self._of(key, desired).persistent = (tuple(found), self._clock() + self._period)

    def conflicts(self, key: Request) -> tuple[FieldConflict, ...]:
        """The fields that were corrected `CONFLICT` times or more."""
        history = self._current(key)
        conflicts = [conflict for conflict, _ in history.corrected.values()] if history else []
        return tuple(each for each in conflicts if each.corrections >= CONFLICT)

    def expiry(self, key: Request) -> float:
        """The seconds until the object has no conflict, if nothing is corrected until then; 0 if it has none."""
        history = self._current(key)
        times = (
            [at for conflict, at in history.corrected.values() if conflict.corrections >= CONFLICT] if history else []
        )
        return max(times) + self._period - self._clock() if times else 0.0

    def forget(self, key: Request) -> None:
        """Forgets an object."""
        self._objects.pop(key, None)

    def _of(self, key: Request, desired: str) -> _Object:
        history = self._current(key)
        if history is None or history.desired != desired:
            history = self._objects[key] = _Object(desired)
        return history

    def _current(self, key: Request) -> _Object | None:
        """The history of an object without expired entries."""
        history = self._objects.get(key)
        if history is not None:
            oldest = self._clock() - self._period
            history.corrected = {path: each for path, each in history.corrected.items() if each[1] > oldest}
        return history

    def _delay(self, corrections: int) -> float:
        return min(self._first_delay * 2 ** min(corrections - 1, 60), self._max_delay)
