"""Backoff for corrections that another client reverts.

Two programs that both correct a field would write as fast as the API server answers. `DriftBackoff` remembers the
corrections of each object: the first correction of a field is immediate, the next ones follow after doubling delays.
A field that has been corrected `CONFLICT` times is a field conflict, which is worth a condition. The creation of an
object that another client deletes counts as a correction (`ABSENT`), as does the deletion of one that another client
creates (`PRESENT`).

A change of the desired object is not drift: all its differences are corrected immediately, within the `WriteBudget` of
the object.
"""

from collections.abc import Callable, Sequence

import msgspec

from accelplane.apiserver.clock import loop_time

from .differences import Difference, Path
from .objects import Request
from .writebudget import WriteBudget

CONFLICT = 3
"""Corrections of a field after which it is a conflict."""
ABSENT = Difference((), is_missing=True)
PRESENT = Difference((), is_extra=True)
_ROUNDING = 0.001


class FieldConflict(msgspec.Struct, frozen=True):
    """A field that was corrected several times, and the managers that set it otherwise, as far as they are known."""

    difference: Difference
    corrections: int
    managers: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The reason of a condition or an event."""
        return "FieldConflict" if self.difference.path else "ObjectConflict"

    def __str__(self) -> str:
        if not self.difference.path:
            done, undone = ("deletions", "created") if self.difference.is_extra else ("creations", "deleted")
            return f"{undone} by another program after {self.corrections} {done}; stop the other program"
        managers = f" by {', '.join(self.managers)}" if self.managers else ""
        return (
            f"{self.difference}: changed{managers} after {self.corrections} corrections; "
            "remove the field from the configuration of the other program"
        )


class _Object(msgspec.Struct):
    """The history of one object. `persistent`: differences that a write did not remove, and the time of a retry."""

    desired: str
    corrected: dict[Path, tuple[FieldConflict, float]] = {}
    written: float = 0.0
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
        budget: WriteBudget | None = None,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._period = period
        self._clock = clock
        self._budget = budget or WriteBudget(clock=clock)
        self._objects: dict[Request, _Object] = {}

    def postponed(
        self, key: Request, desired: str, found: Sequence[Difference]
    ) -> tuple[tuple[Difference, ...], float]:
        """The differences that must not be corrected yet, and the seconds until one of them may be.

        `desired` is the hash of the desired object.
        """
        history, lowest = self._current(key), self._budget.delay(key)
        if history is not None and history.desired != desired:
            history = None
        delays = [max(lowest, self._remaining(history, each) if history else 0.0) for each in found]
        later = tuple(each for each, delay in zip(found, delays, strict=True) if delay > 0)
        return later, min((delay for delay in delays if delay > 0), default=0.0)

    def delay(self, key: Request, desired: str, difference: Difference) -> float:
        """The seconds until this difference may be corrected."""
        return self.postponed(key, desired, (difference,))[1]

    def is_persistent(self, key: Request, desired: str, found: Sequence[Difference]) -> bool:
        """Whether a recent write left exactly these differences in place."""
        history = self._objects.get(key)
        if history is None or history.desired != desired:
            return False
        persistent, until = history.persistent
        return persistent == tuple(found) and self._clock() < until

    def record_write(self, key: Request) -> None:
        """Counts a write of the object."""
        self._budget.record(key)

    def record_correction(
        self,
        key: Request,
        desired: str,
        found: Sequence[Difference],
        managers: Callable[[Difference], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Counts a correction, without its writes. `managers` returns the managers of a field."""
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
        return self._until(max(times) + self._period) if times else 0.0

    def _of(self, key: Request, desired: str) -> _Object:
        history = self._current(key)
        if history is None or history.desired != desired:
            oldest = self._clock() - self._period
            self._objects = {key: each for key, each in self._objects.items() if each.written > oldest}
            history = self._objects[key] = _Object(desired)
        history.written = self._clock()
        return history

    def _current(self, key: Request) -> _Object | None:
        """The history of an object without expired entries."""
        history = self._objects.get(key)
        if history is not None:
            history.corrected = {
                path: each for path, each in history.corrected.items() if self._until(each[1] + self._period) > 0
            }
        return history

    def _remaining(self, history: _Object, difference: Difference) -> float:
        """The seconds until a field may be corrected again."""
        conflict, at = history.corrected.get(difference.path, (None, 0.0))
        return self._until(at + self._delay(conflict.corrections)) if conflict is not None else 0.0

    def _until(self, moment: float) -> float:
        """The seconds until a time. A timer may be early by the rounding of a sum."""
        seconds = moment - self._clock()
        return seconds if seconds > _ROUNDING else 0.0

    def _delay(self, corrections: int) -> float:
        return min(self._first_delay * 2 ** min(corrections - 1, 60), self._max_delay)
