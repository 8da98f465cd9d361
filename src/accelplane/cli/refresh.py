"""Shows a document repeatedly: tables in place on a terminal, everything else one after the other."""

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from accelplane.cli.tables import Document, Format, emit, print_problems, printable, write

# Cursor home; erase to the end of the line; erase to the end of the screen (ECMA-48).
_HOME, _ERASE_LINE, _ERASE_BELOW, _ERASE_ALL = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"

T = TypeVar("T")


async def show(
    read: Callable[[], Awaitable[tuple[Document[T], Sequence[str]]]],
    form: Format,
    interval: float,
    *,
    once: bool,
    program: str,
) -> Sequence[str]:
    """Writes the document of `read` now and, unless `once`, after each `interval` seconds until it is cancelled.

    Returns the problems of `read` if `once`. Otherwise they are written after each document: below a table, in JSON and
    YAML as a part of it, else to standard error. Raises `OutputError`.
    """
    table = form.output in ("table", "wide")
    # Only in a terminal that has a cursor.
    in_place = table and not once and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    prefix = _ERASE_ALL if in_place else ""
    while True:
        document, problems = await read()
        text = write(document, form)
        if table and not once:
            # On a screen standard error would overwrite the table.
            text += "".join(f"{printable(problem)}\n" for problem in problems)
        emit(prefix + ("".join(screen(text, *shutil.get_terminal_size())) if in_place else text))
        if once:
            return problems
        if form.output in ("csv", "name"):
            print_problems(program, problems)
        prefix = "---\n" if form.output == "yaml" else ""
        await asyncio.sleep(interval)


def screen(text: str, columns: int, rows: int) -> Iterator[str]:
    """The text as it replaces the content of a screen: lines that do not fit are left out, and counted."""
    lines, rows = text.splitlines(), max(rows, 2)
    if len(lines) > rows - 1:
        hidden = len(lines) - (rows - 2)
        lines = [*lines[: rows - 2], f"({hidden} more lines; enlarge the terminal)"]
    yield _HOME
    for line in lines:
        yield f"{line[:columns]}{_ERASE_LINE}\n"
    yield _ERASE_BELOW
