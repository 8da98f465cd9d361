"""The queries of screens: filters in the URL, read within limits, and links with them."""

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl, quote

import msgspec
from msgspec import Struct

_MAX_QUERY = 4096
_MAX_FIELDS = 32
_MAX_VALUE = 253
_MAX_PAGE = 100_000
_MAX_TERMS = 16
_UNQUOTED = "/:,!."
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Sort = Literal["problem", "name", "free"]
_SORTS: Mapping[str, Sort] = {"problem": "problem", "name": "name", "free": "free"}


class NodesQuery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which nodes are shown: filters, order, and the page that begins after `start` nodes."""

    family: str = ""
    state: str = ""
    model: str = ""
    labels: str = ""
    holder: str = ""
    text: str = ""
    sort: Sort = "problem"
    start: int = 0


class PlaceQuery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node, or one of its devices."""

    node: str = ""
    plugin: str = ""
    unit: str = ""


class ListQuery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of a list: those with the text, after `start` rows."""

    text: str = ""
    start: int = 0


Query = NodesQuery | PlaceQuery | ListQuery


class Term(Struct, frozen=True):
    """A requirement of a label selector: `values` are allowed, or not if `negated`; without values any is."""

    key: str
    value: str | None
    negated: bool

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels of a node fulfil the requirement; as kubectl, `!=` accepts nodes without the label."""
        found = self.key in labels if self.value is None else labels.get(self.key) == self.value
        return found is not self.negated


class SelectorError(ValueError):
    """A label selector that cannot be read."""


def fields_of(query: str) -> Mapping[str, str]:
    """The fields of a query; the last one counts of several with the same name. Excess is dropped."""
    try:
        pairs = parse_qsl(query[:_MAX_QUERY], errors="replace", max_num_fields=_MAX_FIELDS)
    except ValueError:
        return {}
    return {name: _CONTROL.sub("?", value)[:_MAX_VALUE].strip() for name, value in pairs}


def nodes_query(fields: Mapping[str, str]) -> NodesQuery:
    """The query of the nodes. Unknown values are as if they were not given."""
    names = ("family", "state", "model", "labels", "holder", "text")
    sort = _SORTS.get(fields.get("sort", ""), "problem")
    return NodesQuery(**{name: fields.get(name, "") for name in names}, sort=sort, start=_start(fields))


def place_query(fields: Mapping[str, str]) -> PlaceQuery:
    """The query of a node or a device."""
    return PlaceQuery(node=fields.get("node", ""), plugin=fields.get("plugin", ""), unit=fields.get("unit", ""))


def list_query(fields: Mapping[str, str]) -> ListQuery:
    """The query of a list."""
    return ListQuery(text=fields.get("text", ""), start=_start(fields))


def link(page: str, query: "Query | None" = None, **fields: str) -> str:
    """A relative link to a screen."""
    # Fields with default values are left out, by the types of queries.
    own: dict[str, str | int] = msgspec.to_builtins(query) if query is not None else {}
    all_fields = own | fields
    quoted = {name: quote(str(value), _UNQUOTED, errors="replace") for name, value in all_fields.items() if value != ""}
    text = "&".join(f"{name}={value}" for name, value in quoted.items())
    return f"{page}?{text}" if text else page


def selector_terms(text: str) -> tuple[Term, ...]:
    """The requirements `key=value`, `key!=value`, `key` and `!key`, separated by commas. Raises `SelectorError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > _MAX_TERMS:
        raise SelectorError(f"labels: found {len(words)} requirements, expected at most {_MAX_TERMS}")
    return tuple(_term(word) for word in words)


def _term(word: str) -> Term:
    """Raises `SelectorError`."""
    key, operator, value = word.partition("=")
    negated = key.endswith("!") or (not operator and key.startswith("!"))
    key = key.strip("!").strip()
    value = value.removeprefix("=").strip()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", key) or not re.fullmatch(r"[A-Za-z0-9._-]*", value):
        raise SelectorError(f"labels: found {word!a}, expected key=value, key!=value, key or !key")
    return Term(key, value if operator else None, negated)


def _start(fields: Mapping[str, str]) -> int:
    text = fields.get("start", "")
    return min(int(text), _MAX_PAGE) if text.isascii() and text.isdigit() and len(text) < 10 else 0
