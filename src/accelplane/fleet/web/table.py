"""The table of all screens: sorted by any column, shown in parts, and written as CSV or JSON.

A column has a value, which is sorted and written, and a cell, which is shown. Texts come first in ascending order,
numbers and times in descending order; rows without a value are last in both.
"""

import csv
import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from accelplane.devices.names import natural

from .html import Element, count, element, keyed, live
from .query import Query, ScreenName, link

MAIN = "rows"
ROWS = 100
MAX_ELEMENTS = 2000
"""Elements of the rows of one page: the document of a screen has at most 2,500."""

T = TypeVar("T")
Cell = Element | str
Value = str | float | int | None


class Column(Struct, Generic[T], frozen=True):
    """A column. Without `cell` the value is shown. A `time` is in seconds since the epoch, 0 if it is unknown.

    `order` is sorted in place of the value; a column that is not `shown` is in downloads only.
    """

    name: str
    title: str
    value: Callable[[T], Value]
    cell: Callable[[T], Cell] | None = None
    kind: Literal["text", "number", "time"] = "text"
    order: Callable[[T], Value] | None = None
    shown: bool = True


class Table(Struct, Generic[T], frozen=True, kw_only=True):
    """A table of a screen. Rows with equal keys are numbered; `empty` is the text without rows, if there is one."""

    screen: ScreenName
    caption: str
    columns: Sequence[Column[T]]
    key: Callable[[T], str]
    name: str = MAIN
    empty: str = ""
    noun: str = "row"


class Listing(Struct, Generic[T], frozen=True):
    """The main table of a screen with all its rows, for downloads."""

    table: Table[T]
    rows: Sequence[T]

    def records(self) -> Iterator[Mapping[str, Value]]:
        """The rows with the values of their columns; times are RFC 3339."""
        for row in self.rows:
            yield {column.name: _written(column, column.value(row)) for column in self.table.columns}

    def as_json(self) -> bytes:
        kind = f"Fleet{self.table.screen.title()}Table"
        return msgspec.json.encode({"apiVersion": "accelplane/v1", "kind": kind, "items": list(self.records())})

    def as_csv(self) -> bytes:
        """Numbers without units; texts that a program could take for a formula begin with an apostrophe."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.table.columns])
        writer.writerows([_harmless(value) for value in record.values()] for record in self.records())
        return text.getvalue().encode("utf-8", "replace")


def arranged(table: Table[T], rows: Iterable[T], query: Query) -> list[T]:
    """The rows in the order of the query; as they are if it is that of another table, or none."""
    column, descending = _sorting(table, query)
    if column is None:
        return list(rows)
    known: list[tuple[object, T]] = []
    unknown: list[T] = []
    get, is_time = column.order or column.value, column.kind == "time"
    for row in rows:
        value = get(row)
        if value is None or value == "" or (is_time and value == 0):
            unknown.append(row)
        else:
            known.append((natural(value) if isinstance(value, str) else value, row))
    known.sort(key=lambda pair: pair[0], reverse=descending)  # pyright: ignore[reportCallIssue, reportArgumentType] - values of a column have one type
    return [row for _, row in known] + unknown


def show(
    table: Table[T],
    rows: Iterable[T],
    query: Query,
    *,
    elements: int = MAX_ELEMENTS,
    limit: int = ROWS,
    omitted: int = 0,
) -> Element:
    """A table below its limits, in the order of the query; a line says how many rows are missing.

    `omitted` of them are not in `rows`.
    """
    found = arranged(table, rows, query)
    shown = _part(table, found, elements=elements, limit=limit)
    rest = len(found) - len(shown) + omitted
    text = f"{rest:,} more {table.noun if rest == 1 else f'{table.noun}s'} {'is' if rest == 1 else 'are'} not shown."
    missing = [keyed(element("p", text), "more")] if rest else []
    return element("div", _table(table, shown, query), live(element("div", *missing), f"{table.name}-more"))


def show_part(listing: Listing[T], query: Query) -> tuple[Element, Element]:
    """A part of the main table, and links to the parts before and after it."""
    table, total, start = listing.table, len(listing.rows), query.start
    shown = _part(table, listing.rows[start : start + ROWS])
    noun, following = table.noun, start + len(shown)
    if start and start >= total:
        text = f"Found {counted(total, noun)}; none after {start:,}."
    else:
        text = f"{start + 1:,} to {following:,} of {counted(total, noun)}." if total else f"Found no {noun}."
    first, after = (msgspec.structs.replace(query, start=each) for each in (0, following))
    navigation = element(
        "nav",
        element("span", text),
        element("a", "First", href=link(table.screen, first)) if start else None,
        element("a", "Next", href=link(table.screen, after), rel="next") if following < total else None,
        *(
            element("a", kind.upper(), href=link(f"{table.screen}.{kind}", first), download=True)
            for kind in ("csv", "json")
        ),
        aria_label=f"Parts of the list of {noun}s",
        class_="pages",
    )
    if total and not shown:
        table = msgspec.structs.replace(table, empty=f"No {noun} on this part of the list.")
    parts = live(element("div", keyed(navigation, "pages"), id="pages", tabindex="-1"), "pages")
    return _table(table, shown, query), parts


def age_column(name: str, title: str, since: Callable[[T], float], now: float) -> Column[T]:
    """A column of the seconds since a time, which is 0 if it is unknown."""
    return Column(
        name,
        title,
        lambda row: max(0, round(now - since(row))) if since(row) > 0 else None,
        lambda row: moment(since(row), age=True),
        "number",
    )


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def moment(time: float, *, age: bool = False) -> Cell:
    """A time. The script shows it in the zone of the browser with its age, or its age only."""
    if time <= 0:
        return "-"
    try:
        at = datetime.fromtimestamp(time, UTC)
    except (OverflowError, ValueError, OSError):
        return "-"
    text = f"{at:%Y-%m-%d %H:%M:%S}"
    return element("time", text, datetime=f"{at:%Y-%m-%dT%H:%M:%SZ}", class_="age" if age else None)


def _part(table: Table[T], rows: Iterable[T], *, elements: int = MAX_ELEMENTS, limit: int = ROWS) -> Sequence[Element]:
    """The rows that fit on a page."""
    shown: list[Element] = []
    keys: Counter[str] = Counter()
    total = 0
    for row in itertools.islice(rows, limit):
        key = table.key(row)
        keys[key] += 1
        made = _row(table, row, key if keys[key] == 1 else f"{key} #{keys[key]}")
        total += count(made)
        if total > elements and shown:
            break
        shown.append(made)
    return shown


def _row(table: Table[T], row: T, key: str) -> Element:
    columns = (column for column in table.columns if column.shown)
    cells = [_cell(column, row, head=not index) for index, column in enumerate(columns)]
    return keyed(element("tr", *cells), key)


def _cell(column: Column[T], row: T, *, head: bool) -> Element:
    shown = column.cell(row) if column.cell is not None else _shown(column, column.value(row))
    if head:
        # A long name gets an element that limits its width.
        inner = element("span", shown, class_="name") if isinstance(shown, str) else shown
        return element("th", inner, scope="row")
    cell = shown if isinstance(shown, Element) and shown.tag == "td" else element("td", shown)
    class_ = "number" if column.kind == "number" else ""
    if own := cell.attributes.get("class", ""):
        class_ = f"{class_} {own}".strip()
    attributes = {"data-label": column.title, **cell.attributes} | ({"class": class_} if class_ else {})
    return Element("td", attributes, cell.children)


def _shown(column: Column[T], value: Value) -> Cell:
    if value is None or value == "":
        return "-"
    if isinstance(value, str):
        return value
    if column.kind == "time":
        return moment(value)
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _table(table: Table[T], rows: Sequence[Element], query: Query) -> Element:
    chosen, descending = _sorting(table, query)
    heads = [
        _header(table, column, query, chosen=column is chosen, descending=descending)
        for column in table.columns
        if column.shown
    ]
    body = rows
    if table.empty and not rows:
        body = [keyed(element("tr", element("td", table.empty, colspan=len(heads), class_="empty")), "")]
    content = element(
        "table",
        element("caption", table.caption),
        element("thead", element("tr", *heads)),
        live(element("tbody", *body), table.name),
    )
    # Wide tables scroll on their own; the region can be focused, so that the keyboard scrolls it.
    attributes = {"role": "region", "aria_label": table.caption, "tabindex": "0", "id": table.name}
    return element("div", content, class_="scroll", **attributes)


def _header(table: Table[T], column: Column[T], query: Query, *, chosen: bool, descending: bool) -> Element:
    down = not descending if chosen else column.kind in ("number", "time")
    sort = f"{'-' if down else ''}{_name(table, column)}"
    address = link(table.screen, msgspec.structs.replace(query, sort=sort, start=0))
    fragment = "" if table.name == MAIN else f"#{table.name}"
    return element(
        "th",
        element("a", column.title, href=address + fragment),
        scope="col",
        aria_sort=("descending" if descending else "ascending") if chosen else None,
        class_="number" if column.kind == "number" else None,
    )


def _name(table: Table[T], column: Column[T]) -> str:
    return column.name if table.name == MAIN else f"{table.name}.{column.name}"


def _sorting(table: Table[T], query: Query) -> tuple[Column[T] | None, bool]:
    name = query.sort.removeprefix("-")
    column = next((each for each in table.columns if _name(table, each) == name), None)
    return column, query.sort.startswith("-")


def _written(column: Column[T], value: Value) -> Value:
    if column.kind != "time" or not isinstance(value, float | int):
        return value
    try:
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%dT%H:%M:%SZ}" if value > 0 else None
    except (OverflowError, ValueError, OSError):
        return None


def _harmless(value: Value) -> Value:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
