"""Labels for the Xe-Link topology of GPUs, from the metrics page of XPU Manager.

`links` parses the page and `labels` names the links; both are plain functions. The page is untrusted input: its size is
limited by the caller, the number of links here.

Facts: the text format 0.0.4 of Prometheus, and the metric `xpum_topology_link` of XPU Manager 1.2.
"""

import re
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from typing import NamedTuple

from accelplane.nodelabels import labelvalues

METRIC = "xpum_topology_link"
MAX_LINKS = 4096
_MAX_LINE = 64 * 1024
_MAX_LABELS = 100
_MAX_METRICS = 10_000

_TYPES = frozenset(("counter", "gauge", "histogram", "gauge_histogram", "summary", "untyped"))
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_COMMENT = re.compile(rf"#[ \t]+(TYPE|HELP)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_METRIC = re.compile(rf"({_NAME})[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\[\\"n][^"\\]*)*)"[ \t]*')
_ESCAPE = re.compile(r"\\(.)")
_NUMBER = r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)"
_VALUE = re.compile(rf"[ \t]*({_NUMBER})(?:[ \t]+-?[0-9]+)?", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class PageError(Exception):
    """The page is not in the text format of Prometheus, or exceeds a limit. The message names the line."""


class Link(NamedTuple):
    """One end sees the other through this number of lanes. The ends are the numbers of GPU and tile."""

    local: tuple[int, int]
    remote: tuple[int, int]
    lanes: int


def links(page: str, *, allow_subdeviceless: bool = False) -> list[Link]:
    """The links of a metrics page in their order. Raises `PageError`.

    Samples that are incomplete are ignored, and those that are not on a sub-device unless they are allowed.
    """
    types: dict[str, str] = {}
    helped: set[str] = set()
    sampled: set[str] = set()
    found: list[Link] = []
    # A list of the lines could be many times larger than the page.
    for number, text in enumerate((line.strip(" \t\n") for line in StringIO(page, newline="\n")), 1):
        if not text:
            continue
        try:
            if text.startswith("#"):
                _read_comment(text, types, helped, sampled)
                continue
            name, label_texts, value = _sample(text)
            sampled.add(name)
            if len(sampled) + len(types) + len(helped) > _MAX_METRICS:
                raise PageError(f"found more than {_MAX_METRICS} names of metrics")
        except PageError as error:
            raise PageError(f"line {number}: {error}") from None
        if name != METRIC or value != 1 or types.get(METRIC, "untyped") not in ("gauge", "untyped"):
            continue
        if (link := _link(label_texts, allow_subdeviceless=allow_subdeviceless)) is not None:
            found.append(link)
    return found


def labels(found: list[Link], namespace: str, *, min_lanes: int) -> tuple[dict[str, str], list[str]]:
    """The labels for links with enough lanes, and warnings. Without links the value is empty. Raises `PageError`."""
    texts = Counter(_text(link) for link in found if link.lanes >= min_lanes)
    if len(texts) > MAX_LINKS:
        raise PageError(f"found {len(texts)} links, expected at most {MAX_LINKS}")
    warnings = [f"link {text} occurs {count} times, expected at most 2" for text, count in texts.items() if count > 2]
    return dict(labelvalues.number_labels(f"{namespace}/xe-links", "_".join(texts))), warnings


def _text(link: Link) -> str:
    first, second = (link.local, link.remote) if link.local[0] < link.remote[0] else (link.remote, link.local)
    return f"{first[0]}.{first[1]}-{second[0]}.{second[1]}"


def _read_comment(text: str, types: dict[str, str], helped: set[str], sampled: set[str]) -> None:
    if (found := _COMMENT.fullmatch(text)) is None:
        return
    kind, name, value = found.groups()
    if kind == "HELP":
        if name in helped:
            raise PageError(f"found a second HELP for {name}")
        helped.add(name)
        return
    if str(value).lower() not in _TYPES:
        raise PageError(f"found the type {str(value)[:40]!a}, expected one of {', '.join(sorted(_TYPES))}")
    if name in types or name in sampled:
        raise PageError(f"found TYPE for {name} after another TYPE or a sample")
    types[name] = value.lower()


def _sample(text: str) -> tuple[str, Mapping[str, str], float]:
    """Name, labels and value."""
    if len(text) > _MAX_LINE:
        raise PageError(f"found {len(text)} characters, expected at most {_MAX_LINE}")
    if (name := _METRIC.match(text)) is None:
        raise PageError(f"found {text[:40]!a}, expected the name of a metric")
    position = name.end()
    found: dict[str, str] = {}
    if text[position : position + 1] == "{":
        found, position = _labels(text, position + 1)
    if (value := _VALUE.fullmatch(text, position)) is None:
        raise PageError(f"found {text[position : position + 40]!a}, expected a number")
    return name[1], found, float(value[1])


def _labels(text: str, position: int) -> tuple[dict[str, str], int]:
    """The labels after a brace, and the position after the closing one."""
    found: dict[str, str] = {}
    while (label := _LABEL.match(text, position)) is not None:
        name, position = label[1], label.end()
        if name in found or name == "__name__":
            raise PageError(f"found the label {name[:40]} twice or reserved")
        if len(found) >= _MAX_LABELS:
            raise PageError(f"found more than {_MAX_LABELS} labels")
        found[name] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], label[2])
        if text[position : position + 1] != ",":
            break
        position += 1
    rest = text[position:].lstrip(" \t")
    if not rest.startswith("}"):
        raise PageError(f"found {rest[:40]!a}, expected a label or a closing brace")
    return found, len(text) - len(rest) + 1


def _link(found: Mapping[str, str], *, allow_subdeviceless: bool) -> Link | None:
    if not allow_subdeviceless and found.get("local_on_subdevice", "true") != "true":
        return None
    lanes = _integer(found, "lane_count")
    numbers = [
        *(_integer(found, f"{end}_{part}_id") for end in ("local", "remote") for part in ("device", "subdevice")),
        _integer(found, "lan_count") if lanes is None else lanes,
    ]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(known) < len(numbers):
        return None
    return Link((known[0], known[1]), (known[2], known[3]), known[4])


def _integer(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name, "")
    return int(text) if _INTEGER.fullmatch(text) else None
