"""What a benchmark finds: figures with their spread, and what they are held against."""

import math
import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True):
    """One measured number, `low` to `high` its spread over `samples`.

    `budget` is the most that it may be, None when it only informs. `peers` are what others take for the same, by name.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    samples: int = 1
    budget: float | None = None
    peers: Mapping[str, float] = {}

    @property
    def over_budget(self) -> bool:
        return self.budget is not None and self.value > self.budget


class Outcome(Struct, frozen=True, kw_only=True):
    """All that one benchmark has to say. `skipped` is why it could not run here, `notes` what the figures need."""

    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    skipped: str = ""


class Scale(Struct, frozen=True):
    """How much to measure: in full, or just enough to see that everything works."""

    quick: bool = False

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class Rounds(Struct, frozen=True):
    """What a process that asks has seen: the microseconds of each answer, and the seconds of all."""

    took: Sequence[float]
    seconds: float


def median(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    budget: float | None = None,
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """The middle of `samples`, with the least and the greatest of them."""
    return Figure(
        name=name,
        value=statistics.median(samples),
        unit=unit,
        low=min(samples),
        high=max(samples),
        samples=len(samples),
        budget=budget,
        peers=peers or {},
    )


def single(
    name: str,
    value: float,
    unit: str,
    *,
    samples: int = 1,
    budget: float | None = None,
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """A number that has no spread of its own: a count, a greatest one."""
    return Figure(name=name, value=value, unit=unit, samples=samples, budget=budget, peers=peers or {})


def percentile(
    name: str,
    rounds: Sequence[Sequence[float]],
    share: float,
    unit: str,
    *,
    budget: float | None = None,
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """The value that `share` of all samples do not exceed; the spread is that of the rounds' own."""
    each = [quantile(one, share) for one in rounds]
    everything = [sample for one in rounds for sample in one]
    return Figure(
        name=name,
        value=quantile(everything, share),
        unit=unit,
        low=min(each),
        high=max(each),
        samples=len(everything),
        budget=budget,
        peers=peers or {},
    )


def quantile(samples: Sequence[float], share: float) -> float:
    """By nearest rank: a value that was measured."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
