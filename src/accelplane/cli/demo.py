"""`accelplane demo`: the story of `simulate.demo`, live on a terminal, as plain lines elsewhere."""

import asyncio
import collections
import io
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from accelplane.kubelet.embedded import ResourceStatus
from accelplane.simulate.demo import Demo, DemoError, Step

_LONGEST_LOG = 8
_LONGEST_TEXT = 3  # lines of what was seen last
_LEAST_BESIDE = 40  # columns for what was seen, beside the steps' titles
_LONGEST_BASE = 30
_PACE = 0.9  # seconds a step stays on the screen, so that a reader can follow
_PLAIN_WIDTH = 100
_PICTURE_SIZE = (120, 48)


class Stage:
    """What has happened so far, and how it looks: the story, what the kubelet knows, the agent's log.

    Where the screen is too small for all of it, the log goes first, then the steps that are farthest from the present.
    """

    def __init__(self, demo: Demo, steps: Sequence[Step]) -> None:
        self.demo = demo
        self.steps = steps
        self.seen: list[str] = []
        self.failure = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.kubelet()
        # Three headings, the table's own, and the line below it all in which the cursor rests.
        room = options.max_height - table.row_count - 4
        story, now = self._story(options.max_width)
        first = max(0, min(now + 2, len(story)) - room)
        yield Rule("accelplane demo", style="cyan")
        yield from story[first : first + max(room, 1)]
        yield Rule("what the kubelet knows", style="cyan")
        yield table
        if room - len(story) > 1:
            yield Rule("the agent's log", style="cyan")
            yield self._log(room - len(story) - 1)

    def _story(self, width: int) -> tuple[list[Text], int]:
        """The steps, a line each, and below the last one that is over what was seen; and where that ends."""
        lines: list[Text] = []
        column = max(len(step.title) for step in self.steps)
        beside = width - column >= _LEAST_BESIDE
        told = len(self.seen) if self.failure else len(self.seen) - 1
        present = 0
        for index, step in enumerate(self.steps):
            if index < len(self.seen):
                text = Text.assemble(("✓ ", "bold green"), step.title)
                if beside and index < len(self.seen) - 1:
                    text.append(" " * (column - len(step.title) + 2)).append(self.seen[index], "dim")
            elif index == len(self.seen):
                mark = ("✗ ", "bold red") if self.failure else ("▸ ", "bold yellow")
                text = Text.assemble(mark, (step.title, "bold"))
            else:
                text = Text.assemble("  ", (step.title, "dim"))
            lines.append(text)
            if index == told:
                report, style = (self.failure, "red") if self.failure else (self.seen[index], "cyan")
                # Indented by a piece of its own: in pictures some programs drop the spaces that a text begins with.
                folded = _folded(report, width - 2)[:_LONGEST_TEXT]
                lines.extend(Text.assemble("  ", (line, style)) for line in folded)
                present = len(lines) - 1
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines, present

    def kubelet(self) -> Table:
        """A row for each resource."""
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("resource", no_wrap=True)
        table.add_column("healthy", no_wrap=True)
        table.add_column("NUMA", no_wrap=True)
        # The one column that gives way: its cells themselves refuse to be wrapped.
        table.add_column("sick; pods and what they hold", overflow="ellipsis")
        holders = self.demo.holders()
        for resource, status in self.demo.kubelet.resources().items():
            held: dict[str, list[str]] = {}
            for id_ in status.devices:
                if pod := holders.get((resource, id_)):
                    held.setdefault(pod, []).append(_short(resource, id_))
            notes = [Text(f"{pod} {' '.join(ids)}") for pod, ids in held.items()]
            sick = [_short(resource, id_) for id_, device in status.devices.items() if not device.healthy]
            if sick:
                text = f"sick {sick[0]}" if len(sick) == 1 else f"sick {sick[0]} +{len(sick) - 1}"
                notes.insert(0, Text("all sick" if len(sick) == len(status.devices) else text, style="bold red"))
            healthy = Text(f"{status.allocatable}/{status.capacity}", style="bold red" if sick else "green")
            table.add_row(resource, healthy, _places(status), Text("; ", no_wrap=True, overflow="ellipsis").join(notes))
        return table

    def _log(self, most: int) -> Text:
        try:
            with open(self.demo.log, errors="replace") as file:
                lines = list(collections.deque(file, maxlen=min(most, _LONGEST_LOG)))
        except FileNotFoundError:
            lines = []
        return Text("".join(lines).rstrip(), style="dim", no_wrap=True, overflow="ellipsis")


def run(*, keep: bool, svg: str = "") -> int:
    """Plays the story; 0 only if every step really happened. `svg` is a file for a picture of its screen."""
    # Socket paths below it have at most 107 bytes.
    near = len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_BASE
    directory = tempfile.mkdtemp(prefix="accelplane-", dir=None if near else "/tmp")  # noqa: S108
    try:
        return asyncio.run(play(Demo(directory), svg))
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def play(demo: Demo, svg: str) -> int:
    """Runs the demo's steps and shows them; 0 if all of them passed."""
    stage = Stage(demo, demo.steps())
    begin = time.monotonic()
    async with demo.running():
        if sys.stdout.isatty():
            with Live(stage, refresh_per_second=8, screen=False):
                failed = await _tell(stage, _PACE, svg)
        else:
            failed = await _tell(stage, 0.0, svg)
    print(f"demo {'failed' if failed else 'passed'} in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


async def _tell(stage: Stage, pace: float, svg: str) -> bool:
    for step in stage.steps:
        begin = time.monotonic()
        try:
            seen = await step.work()
        except (DemoError, TimeoutError, OSError) as error:
            stage.failure = str(error) or type(error).__name__
            print(f"FAILED  {step.title}: {stage.failure}", file=sys.stderr)
            return True
        stage.seen.append(seen)
        if svg and step.picture:
            _draw(stage, svg)
        if pace:
            await asyncio.sleep(max(0.0, pace - (time.monotonic() - begin)))
        else:
            print(f"ok  {step.title}", *_indented(_folded(seen, _PLAIN_WIDTH - 6)), sep="\n", flush=True)
            if step.picture:
                _print_plain(stage)
    return False


def _print_plain(stage: Stage) -> None:
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH - 6, color_system=None).print(stage.kubelet())
    print("", *_indented(text.getvalue().splitlines()), "", sep="\n", flush=True)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"      {line}".rstrip() for line in lines]


def _folded(text: str, width: int) -> list[str]:
    wrapped = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return [line for lines in wrapped for line in lines]


def _short(resource: str, id_: str) -> str:
    """The id without the name of its resource."""
    return id_.removeprefix(f"{resource.partition('/')[2]}-")


def _places(status: ResourceStatus) -> str:
    return ",".join(map(str, sorted({node for device in status.devices.values() for node in device.nodes}))) or "-"


def _draw(stage: Stage, path: str) -> None:
    width, height = _PICTURE_SIZE
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(stage)
    # Without the web fonts that rich names: a picture fetches nothing.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", console.export_svg(title="make demo"), flags=re.DOTALL)
    with open(path, "w", encoding="utf-8") as file:
        file.write(picture)
