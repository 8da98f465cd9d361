"""A strict reader of the Prometheus text format, version 0.0.4: what promtool rejects, this rejects."""

import re
from typing import NamedTuple

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{(?P<labels>(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"(?:,(?=[a-zA-Z_]))?)*)\})? '
    r"(?P<value>[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|Inf)|NaN)"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SUFFIXES = ("_bucket", "_count", "_sum")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class Family(NamedTuple):
    kind: str
    help: str
    samples: list[Sample]


def parse(page: bytes) -> dict[str, Family]:
    """The families in their order. Raises `ValueError` with the line."""
    text = page.decode("utf-8")
    if not text.endswith("\n"):
        raise ValueError("no newline at the end")
    families: dict[str, Family] = {}
    helps: dict[str, str] = {}
    names: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, help_ = line.removeprefix("# HELP ").partition(" ")
            _check(name not in helps, line)
            helps[name], current = help_, ""
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            _check(name in helps and name not in families and kind in ("counter", "gauge", "histogram"), line)
            _check((kind == "counter") == name.endswith("_total"), line)
            families[name], current = Family(kind, helps[name], []), name
        else:
            sample = _sample(line)
            suffixes = _SUFFIXES if current and families[current].kind == "histogram" else ("",)
            _check(bool(current) and sample.name in {f"{current}{suffix}" for suffix in suffixes}, line)
            key = (sample.name, tuple(sorted(sample.labels.items())))
            _check(key not in names, line)
            names.add(key)
            families[current].samples.append(sample)
    _check(helps.keys() == families.keys(), "HELP without TYPE")
    return families


def _sample(line: str) -> Sample:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"not a sample: {line!r}")
    pairs = [
        (name, re.sub(r'\\[\\"n]', lambda escape: _ESCAPES[escape[0]], value))
        for name, value in _LABEL.findall(found["labels"] or "")
    ]
    _check(len(dict(pairs)) == len(pairs) and not any(name.startswith("__") for name, _ in pairs), line)
    return Sample(found["name"], dict(pairs), float(found["value"]))


def _check(valid: bool, line: str) -> None:
    if not valid:
        raise ValueError(f"invalid: {line[:200]!r}")
