"""The queries of screens in their URLs: place, filters, order and part of a list, read within limits; and links."""

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl, quote

import msgspec
from msgspec import Struct

_MAX_QUERY = 4096
_MAX_FIELDS = 32
_MAX_VALUE = 253
_MAX_START = 1_000_000
_UNQUOTED = "/:,!."
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

ScreenName = Literal[
    "overview", "devices", "nodes", "node", "device", "pods", "waiting", "namespaces", "groups", "search"
]


class Query(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a screen shows. `node`, `plugin` and `unit` are a place; with the texts until `text` they select devices.

    `group` is a node label, `sort` a column as `table.column`, with `-` before it in descending order; the name of the
    main table is left out. The list begins after `start` rows.
    """

    node: str = ""
    plugin: str = ""
    unit: str = ""
    family: str = ""
    state: str = ""
    model: str = ""
    labels: str = ""
    holder: str = ""
    text: str = ""
    group: str = ""
    sort: str = ""
    start: int = 0

    @property
    def has_filters(self) -> bool:
        """Whether some devices are excluded."""
        return msgspec.structs.replace(self, sort="", start=0, group="") != Query()


def fields_of(query: str) -> Mapping[str, str]:
    """The fields of a query; the last one counts of several with the same name. Excess is dropped."""
    try:
        pairs = parse_qsl(query[:_MAX_QUERY], errors="replace", max_num_fields=_MAX_FIELDS)
    except ValueError:
        return {}
    return {name: _CONTROL.sub("?", value)[:_MAX_VALUE].strip() for name, value in pairs}


def query_of(fields: Mapping[str, str]) -> Query:
    """The query in the fields of a URL."""
    start = fields.get("start", "")
    texts = {name: fields[name] for name in Query.__struct_fields__ if name in fields and name != "start"}
    number = int(start) if start.isascii() and start.isdigit() and len(start) < 10 else 0
    return Query(**texts, start=min(number, _MAX_START))


def link(screen: ScreenName | str, query: Query | None = None, /, **fields: str) -> str:
    """A relative link to a screen, or to another address."""
    # Fields with default values are left out, by the type of queries.
    own: dict[str, str | int] = msgspec.to_builtins(query) if query is not None else {}
    quoted = {
        name: quote(str(value), _UNQUOTED, errors="replace") for name, value in (own | fields).items() if value != ""
    }
    text = "&".join(f"{name}={value}" for name, value in quoted.items())
    page = "./" if screen == "overview" else screen
    return f"{page}?{text}" if text else page
