"""Label and field selectors, as list and watch requests have them."""

import re
from collections.abc import Mapping
from typing import Any

_SET = re.compile(r"([^\s!=,()]+)\s+(in|notin)\s*\(([^)]*)\)")
_EQUALITY = re.compile(r"([^\s!=,()]+)\s*(==|=|!=)\s*([^\s,]*)")
_EXISTENCE = re.compile(r"(!?)\s*([^\s!=,()]+)")


def matches(thing: Mapping[str, Any], parameters: Mapping[str, str]) -> bool:
    """Whether an object matches `labelSelector` and `fieldSelector`. Raises `ValueError` for invalid ones."""
    labels: Mapping[str, str] = thing["metadata"].get("labels") or {}
    return _matches_labels(labels, parameters.get("labelSelector", "")) and _matches_fields(
        thing, parameters.get("fieldSelector", "")
    )


def _matches_labels(labels: Mapping[str, str], selector: str) -> bool:
    rest = selector.strip()
    while rest:
        if found := _SET.match(rest):
            name, operator, values = found.groups()
            chosen = {value.strip() for value in values.split(",")}
            met = (name in labels and labels[name] in chosen) if operator == "in" else labels.get(name) not in chosen
        elif found := _EQUALITY.match(rest):
            name, operator, value = found.groups()
            met = (labels.get(name) == value) == (operator != "!=")
        elif found := _EXISTENCE.match(rest):
            negation, name = found.groups()
            met = (name in labels) == (not negation)
        else:
            raise ValueError(f"labelSelector {selector!r}")
        rest = rest[found.end() :].strip()
        if rest and not rest.startswith(","):
            raise ValueError(f"labelSelector {selector!r}")
        rest = rest[1:].strip()
        if not met:
            return False
    return True


def _matches_fields(thing: Mapping[str, Any], selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        found = _EQUALITY.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"fieldSelector {selector!r}")
        path, operator, value = found.groups()
        if (_field(thing, path) == value) != (operator != "!="):
            return False
    return True


def _field(thing: Mapping[str, Any], path: str) -> str:
    """The text of a field, empty if the object does not have it."""
    found: Any = thing
    for name in path.split("."):
        found = found.get(name) or {}
    return str(found or "")
