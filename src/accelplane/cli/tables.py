"""Writes rows as tables, JSON, YAML, CSV or names: the outputs of `inspect` and `top`.

Texts of devices, pods and drivers are untrusted: tables, CSV and names show characters that cannot be printed as `?`.
"""

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from accelplane import jsontext
from accelplane.controls import escape_text
from accelplane.devices import natural

API_VERSION = "accelplane/v1"
UNKNOWN = "-"

T = TypeVar("T")
Output = Literal["table", "wide", "json", "yaml", "name", "csv"]
OUTPUTS: tuple[Output, ...] = get_args(Output)

_GAP = "   "
_MAX_TIME = 253402300799.0  # the end of the year 9999


_GREEN, _RED, _RESET = "\x1b[32m", "\x1b[31m", "\x1b[0m"


class UsageError(ValueError):
    """The command line is invalid. The exit code is 2."""


class OutputError(Exception):
    """Standard output cannot be written. The exit code is 1."""


class Format(Struct, frozen=True, kw_only=True):
    """How to write. `sort_by` is the title of a column; rows keep their order if it is empty."""

    output: Output = "table"
    headers: bool = True
    sort_by: str = ""


class Column(Struct, frozen=True):
    """A column; one that is `wide` is in the outputs wide and csv only. `health` has colors if colors are used.

    With a `field`, rows are sorted by this number of their item, and CSV has it under this name in place of the text.
    """

    title: str
    wide: bool = False
    health: bool = False
    field: str = ""


class Row(Struct, Generic[T], frozen=True):
    """One row: its name, the text of each column, and its value in JSON and YAML."""

    name: str
    cells: Sequence[str]
    item: T


class Table(Struct, Generic[T], frozen=True):
    """Rows with their columns. `key` is their key in JSON and YAML, `empty` the text of a table without rows."""

    key: str
    columns: Sequence[Column]
    rows: Sequence[Row[T]]
    empty: str = ""


class Document(Struct, Generic[T], frozen=True):
    """The tables of an output. `kind` names the schema of JSON and YAML, `facts` are further keys of them."""

    tables: Sequence[Table[T]]
    facts: Mapping[str, object] = {}
    kind: str = ""


def write(document: Document[T], form: Format, *, colors: bool = False) -> str:
    """The text, with a newline at its end unless it is empty. Raises `UsageError` for an unknown column.

    CSV has one header, so it contains the first table only. Only columns of health have colors.
    """
    tables = sort_tables(document.tables, form.sort_by)
    match form.output:
        case "json" | "yaml":
            content = {"apiVersion": API_VERSION, "kind": document.kind, **document.facts}
            content |= {table.key: [row.item for row in table.rows] for table in tables}
            return format_content(content, form.output)
        case "name":
            return "".join(f"{printable(row.name)}\n" for table in tables for row in table.rows)
        case "csv":
            return _csv(tables[0], headers=form.headers)
        case "table" | "wide":
            wide = form.output == "wide"
            texts = [_align(table, wide=wide, headers=form.headers, colors=colors) for table in tables]
            return "\n".join(text for text in texts if text)


def emit(text: str) -> None:
    """Writes the text to standard output. Raises `OutputError`, and `BrokenPipeError` if the reader has ended."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror or error}") from None


def uses_colors() -> bool:
    """Whether standard output is a terminal with colors. `NO_COLOR` with any text disables them (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def color(text: str, *, good: bool) -> str:
    """The text in green or red."""
    return f"{_GREEN if good else _RED}{text}{_RESET}"


def print_problems(program: str, problems: Sequence[str]) -> int:
    """Prints the problems to standard error. Returns the exit code, 1 if there are any."""
    for problem in problems:
        print(f"{program}: {printable(problem)}", file=sys.stderr)
    return 1 if problems else 0


def format_content(content: object, output: Output) -> str:
    """The content as JSON or YAML."""
    if output == "json":
        return jsontext.indented(content) + "\n"
    import yaml  # noqa: PLC0415 - only this output needs it

    plain = msgspec.to_builtins(content)
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    if escape_text(text, keep_lines=True) == text:
        return text
    # PyYAML escapes control characters, but not those that change the order of text.
    return yaml.safe_dump(plain, sort_keys=False)


def sort_tables(tables: Sequence[Table[T]], sort_by: str) -> Sequence[Table[T]]:
    """The tables with their rows in the order of a column, which one of them must have. Raises `UsageError`."""
    if not sort_by:
        return tables
    column = sort_by.upper()
    titles = [column.title for table in tables for column in table.columns]
    if column not in titles:
        known = ", ".join(dict.fromkeys(titles))
        raise UsageError(f"--sort-by: found {sort_by[:80]!a}, expected one of {known}")
    return [_sort(table, column) for table in tables]


def time_text(seconds: float | None) -> str | None:
    """A Unix time as RFC 3339 text in UTC, None if it is unknown or not within the years 1970 to 9999."""
    if seconds is None or not 0 < seconds <= _MAX_TIME:
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def printable(text: str) -> str:
    """The text without control characters, lone surrogates and other characters that cannot be printed."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def _sort(table: Table[T], column: str) -> Table[T]:
    titles = [column.title for column in table.columns]
    if column not in titles:
        return table
    position = titles.index(column)
    if field := table.columns[position].field:
        return replace(table, rows=sorted(table.rows, key=lambda row: _number_key(getattr(row.item, field))))
    return replace(table, rows=sorted(table.rows, key=lambda row: natural(row.cells[position])))


def _number_key(number: float | None) -> tuple[bool, float]:
    """Numbers in their order, unknown ones last."""
    return number is None, number or 0.0


def _csv(table: Table[T], *, headers: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if headers:
        writer.writerow([column.field or column.title for column in table.columns])
    for row in table.rows:
        cells = zip(table.columns, row.cells, strict=True)
        writer.writerow(getattr(row.item, one.field) if one.field else printable(cell) for one, cell in cells)
    return text.getvalue()


def _align(table: Table[T], *, wide: bool, headers: bool, colors: bool) -> str:
    if not table.rows:
        return f"{table.empty}\n" if table.empty and headers else ""
    shown = [index for index, column in enumerate(table.columns) if wide or not column.wide]
    lines = [[printable(row.cells[index]) for index in shown] for row in table.rows]
    if headers:
        lines.insert(0, [table.columns[index].title for index in shown])
    widths = [max(len(line[position]) for line in lines) for position in range(len(shown))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    health = [position for position, index in enumerate(shown) if colors and table.columns[index].health]
    for line in padded[headers:]:
        for position in health:
            word, blank, rest = line[position].partition(" ")
            line[position] = color(word, good=word == "Healthy") + blank + rest
    return "".join(f"{_GAP.join(line).rstrip()}\n" for line in padded)
