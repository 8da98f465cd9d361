"""The results of a benchmark: figures with spread, budget and peers."""

import math
import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct


class Figure(Struct, frozen=True, kw_only=True):
    """One measured number with its spread from `low` to `high` over `samples`.

    `budget` is the upper limit, None without one. `peers` are the figures of other programs, by name.
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


class Result(Struct, frozen=True, kw_only=True):
    """The figures of one benchmark. `skipped` is the reason if it could not run; `notes` explain the figures."""

    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    skipped: str = ""


class Scale(Struct, frozen=True):
    """The number of repetitions: full, or few, to check that the benchmarks work."""

    quick: bool = False

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class ReviewTimes(Struct, frozen=True):
    """The latency of each review in microseconds, and the duration of all in seconds."""

    latencies: Sequence[float]
    seconds: float


def median(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    budget: float | None = None,
    peers: Mapping[str, float] | None = None,
) -> Figure:
    """The median of `samples`, with minimum and maximum."""
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
    """A number without spread, such as a count or a maximum."""
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
    """The quantile `share` of all samples. The spread is that of the quantiles of the rounds."""
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
    """The quantile by nearest rank, which is always one of the samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
