"""Shows a text or tables again and again: in place on a terminal, one after the other elsewhere."""

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TextIO, TypeVar

from accelplane.cli.tables import Document, Format, with_problems, write

# Cursor home; erase to the end of the line; erase to the end of the screen (ECMA-48).
_HOME, _ERASE_LINE, _ERASE_BELOW, _ERASE_ALL = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"

Frame = Callable[[], Awaitable[str]]
T = TypeVar("T")


async def show(
    read: Callable[[], Awaitable[tuple[Document[T], Sequence[str]]]], form: Format, interval: float, *, once: bool
) -> Sequence[str]:
    """Shows the document of `read`, with its problems unless `once`, as `refresh` does. Returns the last problems."""
    problems: Sequence[str] = ()

    async def frame() -> str:
        nonlocal problems
        document, problems = await read()
        text = write(document, form)
        return text if once else with_problems(text, problems, form)

    await refresh(frame, interval, once=once)
    return problems


async def refresh(frame: Frame, interval: float, *, once: bool) -> None:
    """Writes `await frame()` now and, unless `once`, after each `interval` seconds until it is cancelled."""
    output = sys.stdout
    in_place = not once and can_redraw(output, os.environ)
    if in_place:
        output.write(_ERASE_ALL)
    while True:
        text = await frame()
        output.write("".join(screen(text, *shutil.get_terminal_size())) if in_place else text)
        output.flush()
        if once:
            return
        await asyncio.sleep(interval)


def can_redraw(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal that has a cursor."""
    return stream.isatty() and environment.get("TERM", "") not in ("", "dumb")


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
