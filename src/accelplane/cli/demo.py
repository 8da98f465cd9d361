"""`accelplane demo`: the story of `simulate.demo`, live on a terminal, as plain lines elsewhere."""

import asyncio
import collections
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from accelplane.simulate.demo import Demo, DemoError, Step

_LONGEST_LOG = 8
_LONGEST_BASE = 30
_PACE = 1.2  # seconds a step stays on the screen, so that a reader can follow


class _Stage:
    """What has happened so far, and how it looks."""

    def __init__(self, demo: Demo, steps: Sequence[Step]) -> None:
        self.demo = demo
        self.steps = steps
        self.seen: list[str] = []
        self.failure = ""

    def __rich__(self) -> Group:
        return Group(self._story(), self._kubelet(), self._log())

    def _story(self) -> Panel:
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for index, step in enumerate(self.steps):
            if index < len(self.seen):
                table.add_row(Text("✓", style="bold green"), step.title, Text(self.seen[index], style="dim"))
            elif index == len(self.seen):
                mark = Text("✗", style="bold red") if self.failure else Text("▸", style="bold yellow")
                table.add_row(mark, Text(step.title, style="bold"), Text(self.failure, style="red"))
            else:
                table.add_row(" ", Text(step.title, style="dim"), "")
        return Panel(table, title="accelplane demo", border_style="cyan")

    def _kubelet(self) -> Panel:
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        for column in ("resource", "device", "NUMA", "health", "held by"):
            table.add_column(column)
        holders = self.demo.holders()
        for resource, status in self.demo.kubelet.resources().items():
            for id_, device in status.devices.items():
                health = Text(device.health, style="green" if device.healthy else "bold red")
                nodes = ",".join(map(str, device.nodes)) or "-"
                table.add_row(resource, id_, nodes, health, holders.get((resource, id_), ""))
        return Panel(table, title="what the kubelet knows", border_style="blue")

    def _log(self) -> Panel:
        try:
            with open(self.demo.log, errors="replace") as file:
                lines = list(collections.deque(file, maxlen=_LONGEST_LOG))
        except FileNotFoundError:
            lines = []
        text = Text("".join(lines).rstrip(), style="dim", no_wrap=True, overflow="ellipsis")
        return Panel(text, title="the agent's log", border_style="magenta", height=_LONGEST_LOG + 2)


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
    stage = _Stage(demo, demo.steps())
    begin = time.monotonic()
    async with demo.running():
        if sys.stdout.isatty():
            with Live(stage, refresh_per_second=8, screen=False):
                failed = await _tell(stage, _PACE, svg)
        else:
            failed = await _tell(stage, 0.0, svg)
    print(f"demo {'failed' if failed else 'passed'} in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


async def _tell(stage: _Stage, pace: float, svg: str) -> bool:
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
            print(f"ok  {step.title}\n      {seen}", flush=True)
    return False


def _draw(stage: _Stage, path: str) -> None:
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(stage)
    # Without the web fonts that rich names: a picture fetches nothing.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", console.export_svg(title="make demo"), flags=re.DOTALL)
    with open(path, "w", encoding="utf-8") as file:
        file.write(picture)
