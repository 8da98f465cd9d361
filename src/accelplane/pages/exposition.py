"""Metric families in the Prometheus text format, version 0.0.4.

Rendered without prometheus-client: its import takes 4 MB, its sample objects ten times as long.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from accelplane.readings.values import LABEL_NAME, METRIC_NAME, NOT_FINITE, escape

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HEAD_LINES = 2  # HELP and TYPE
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Family:
    """One metric: `name` is complete, with `_total` for counters."""

    def __init__(self, name: str, description: str, kind: Literal["counter", "gauge", "histogram"] = "gauge") -> None:
        """Raises `ValueError` if the name is invalid."""
        self.name = name
        self._series: set[str] = set()
        self._lines = [*_head(name, description, kind)]

    def add(self, value: float, labels: Mapping[str, str] | None = None, suffix: str = "") -> None:
        """Adds a sample, unless one has the same labels, which are cut. Raises `ValueError` for invalid names."""
        name = f"{self.name}{suffix}"
        self._add(_series(name, **labels) if labels else name, value)

    def _add(self, series: str, value: float) -> None:
        if series not in self._series:
            self._series.add(series)
            self._lines.append(f"{series} {_number(value)}")

    def add_lines(self, lines: Iterable[str]) -> None:
        """Adds samples that are rendered already."""
        self._lines += lines

    @property
    def samples(self) -> Sequence[str]:
        return self._lines[_HEAD_LINES:]

    def __len__(self) -> int:
        return len(self._lines) - _HEAD_LINES

    def add_label(self, label: str) -> None:
        """Adds a rendered label to all samples that have none of this name."""
        # A quotation mark in the text of a label has a backslash before it.
        name = f'{label.partition("=")[0]}="'
        present = f"{{{name}", f",{name}"
        self._lines[_HEAD_LINES:] = [
            line if any(each in line for each in present) else _with_label(line, label)
            for line in self._lines[_HEAD_LINES:]
        ]

    def add_histogram(
        self, bounds: Iterable[float], counts: Iterable[int], total: float, labels: Mapping[str, str]
    ) -> None:
        """Adds a histogram: `counts` has one number for each of `bounds` and one above them, `total` is the sum."""
        cumulative = 0
        for series, count in zip(_buckets(self.name, tuple(bounds), **labels), counts, strict=True):
            cumulative += count
            self._add(series, cumulative)
        self.add(cumulative, labels, "_count")
        self.add(total, labels, "_sum")

    @property
    def lines(self) -> Sequence[str]:
        return self._lines


def _with_label(line: str, label: str) -> str:
    head, brace, rest = line.partition("{")
    if brace:
        return f"{head}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"


def render(families: Iterable[Family]) -> bytes:
    """The page. Characters that UTF-8 cannot encode become `?`."""
    lines = itertools.chain.from_iterable(family.lines for family in families)
    return "\n".join((*lines, "")).encode(errors="replace")


@lru_cache(maxsize=256)
def _head(name: str, description: str, kind: str) -> Sequence[str]:
    """The lines before the samples of a family. Raises `ValueError` if the name is invalid."""
    if not METRIC_NAME.fullmatch(name):
        raise ValueError(f"metric name {name!a}: expected letters, digits, _ and :, and no digit first")
    return f"# HELP {name} {description.translate(_HELP)}", f"# TYPE {name} {kind}"


@lru_cache(maxsize=256)
def _buckets(metric: str, bounds: tuple[float, ...], /, **labels: str) -> Sequence[str]:
    """The series of a histogram's buckets. Raises `ValueError` if the name of a label is invalid."""
    return [_series(f"{metric}_bucket", le=_number(bound), **labels) for bound in (*bounds, math.inf)]


@lru_cache(maxsize=2048)  # most series are on every page
def _series(metric: str, /, **labels: str) -> str:
    """The metric with its labels. Raises `ValueError` if the name of a label is invalid."""
    return f"{metric}{{{','.join(_pairs(metric, labels))}}}"


def _pairs(metric: str, labels: Mapping[str, str]) -> list[str]:
    """The rendered labels in the order of their names. Raises `ValueError` if a name is invalid."""
    for name in labels:
        if not LABEL_NAME.fullmatch(name):
            raise ValueError(f"label {name!a} of metric {metric}: expected letters, digits and _")
    return [f'{name}="{escape(text)}"' for name, text in sorted(labels.items())]


def _number(value: float) -> str:
    text = repr(float(value))
    return NOT_FINITE.get(text, text)
