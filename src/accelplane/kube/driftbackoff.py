"""Backoff for corrections that another client reverts.

Two programs that both correct a field would write as fast as the API server answers. `DriftBackoff` remembers the
corrections of each object: the first correction of a field is made at once, the next ones after delays that double.
A field that has been corrected `CONFLICT` times is a field conflict, which is worth a condition.

A new wish is no drift: if the wanted object changes, everything is corrected at once.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from .differences import Difference, Path
from .objects import Request

CONFLICT = 3
"""Corrections of a field from which on it is a conflict."""


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
    """What is known of one object. `kept` are differences that the API server keeps, and when that is tried again."""

    wanted: str
    corrected: dict[Path, tuple[FieldConflict, float]] = {}
    kept: tuple[tuple[Difference, ...], float] = ((), 0.0)


class DriftBackoff:
    """The corrections of the objects of one kind.

    Delays double from `first_delay` to `max_delay` seconds. A field that was not corrected for `period` seconds is
    forgotten.
    """

    def __init__(
        self,
        *,
        first_delay: float = 1.0,
        max_delay: float = 300.0,
        period: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._period = period
        self._clock = clock
        self._objects: dict[Request, _Object] = {}

    def delay(self, key: Request, wanted: str, found: Sequence[Difference]) -> float:
        """The seconds until these differences may be corrected. `wanted` is the hash of the wanted object."""
        known = self._current(key)
        if known is None or known.wanted != wanted:
            return 0.0
        now = self._clock()
        corrected = [known.corrected[each.path] for each in found if each.path in known.corrected]
        return max([0.0, *(at + self._delay(conflict.corrections) - now for conflict, at in corrected)])

    def is_kept(self, key: Request, wanted: str, found: Sequence[Difference]) -> bool:
        """Whether the API server recently kept exactly these differences when they were to be corrected."""
        known = self._objects.get(key)
        if known is None or known.wanted != wanted:
            return False
        kept, until = known.kept
        return kept == tuple(found) and self._clock() < until

    def record_correction(
        self, key: Request, wanted: str, found: Sequence[Difference], managers: Callable[[Difference], tuple[str, ...]]
    ) -> None:
        """Counts a correction. `managers` returns the managers of a field."""
        known = self._of(key, wanted)
        now = self._clock()
        for each in found:
            before = known.corrected.get(each.path)
            count = 1 + (before[0].corrections if before else 0)
            known.corrected[each.path] = (FieldConflict(each, count, managers(each)), now)

    def record_kept(self, key: Request, wanted: str, found: Sequence[Difference]) -> None:
        """Remembers that the API server kept these differences."""
        self._of(key, wanted).kept = (tuple(found), self._clock() + self._period)

    def conflicts(self, key: Request) -> tuple[FieldConflict, ...]:
        """The fields that were corrected `CONFLICT` times or more."""
        known = self._current(key)
        conflicts = [conflict for conflict, _ in known.corrected.values()] if known else []
        return tuple(each for each in conflicts if each.corrections >= CONFLICT)

    def expiry(self, key: Request) -> float:
        """The seconds until the object has no conflict, if nothing is corrected until then; 0 if it has none."""
        known = self._current(key)
        times = [at for conflict, at in known.corrected.values() if conflict.corrections >= CONFLICT] if known else []
        return max(times) + self._period - self._clock() if times else 0.0

    def forget(self, key: Request) -> None:
        """Forgets an object."""
        self._objects.pop(key, None)

    def _of(self, key: Request, wanted: str) -> _Object:
        known = self._current(key)
        if known is None or known.wanted != wanted:
            known = self._objects[key] = _Object(wanted)
        return known

    def _current(self, key: Request) -> _Object | None:
        """What is known of an object, without what is too old."""
        known = self._objects.get(key)
        if known is not None:
            oldest = self._clock() - self._period
            known.corrected = {path: each for path, each in known.corrected.items() if each[1] > oldest}
        return known

    def _delay(self, corrections: int) -> float:
        return min(self._first_delay * 2 ** min(corrections - 1, 60), self._max_delay)
