"""Shows tables again and again: in place on a terminal, one after the other elsewhere."""

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from accelplane.cli.tables import Document, Format, printable, write

# Cursor home; erase to the end of the line; erase to the end of the screen (ECMA-48).
_HOME, _ERASE_LINE, _ERASE_BELOW, _ERASE_ALL = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"

T = TypeVar("T")


async def show(
    read: Callable[[], Awaitable[tuple[Document[T], Sequence[str]]]], form: Format, interval: float, *, once: bool
) -> Sequence[str]:
    """Writes the document of `read` now and, unless `once`, after each `interval` seconds until it is cancelled.

    The problems of `read` are below the document unless `once`. Returns the problems.
    """
    # Only in a terminal that has a cursor.
    in_place = not once and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    if in_place:
        sys.stdout.write(_ERASE_ALL)
    while True:
        document, problems = await read()
        text = write(document, form)
        if not once and form.output in ("table", "wide"):
            # On a screen standard error would overwrite the table.
            text += "".join(f"{printable(problem)}\n" for problem in problems)
        sys.stdout.write("".join(screen(text, *shutil.get_terminal_size())) if in_place else text)
        sys.stdout.flush()
        if once:
            return problems
        await asyncio.sleep(interval)


def screen(text: str, columns: int, rows: int) -> Iterator[str]:
    """The text as it replaces the content of a screen: lines that do not fit are left out, and counted."""
    lines = text.splitlines()
    if len(lines) > rows - 1:
        hidden = len(lines) - (rows - 2)
        lines = [*lines[: rows - 2], f"({hidden} more lines; enlarge the terminal)"]
    yield _HOME
    for line in lines:
        yield f"{line[:columns]}{_ERASE_LINE}\n"
    yield _ERASE_BELOW
