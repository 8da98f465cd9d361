"""`accelplane demo`: shows the steps of `simulate.demo` live on a terminal, or as plain text without one."""

import asyncio
import collections
import io
import os
import re
import shutil
import signal
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

from accelplane.simulate.demo import Demo, DemoError, Step

_MAX_LOG_LINES = 8
_MAX_RESULT_LINES = 3
_MIN_RESULT_WIDTH = 40  # columns for a result on the line of its step
_MAX_TMPDIR_LENGTH = 30
_MIN_STEP_SECONDS = 0.9  # on a terminal, so that a reader can follow
_PLAIN_WIDTH = 100
_PICTURE_SIZE = (120, 48)
_INTRODUCTION = """\
The agent is real. The hardware and the kubelet are simulated. Each step performs an action and
waits until the kubelet shows its effect; "4/6" means that 4 of 6 devices are allocatable."""


class Screen:
    """A rich renderable of the progress: the steps, the kubelet's resources and the agent's log.

    On a small screen the log is left out first, then the steps that are farthest from the current one.
    """

    def __init__(self, demo: Demo, steps: Sequence[Step]) -> None:
        self.demo = demo
        self.steps = steps
        self.results: list[str] = []
        self.failure = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.resources()
        # Three rules, the table's header, and the line of the cursor below.
        room = options.max_height - table.row_count - 4
        steps, current = self._step_lines(options.max_width)
        first = max(0, min(current + 2, len(steps)) - room)
        yield Rule("accelplane demo", style="cyan")
        yield from steps[first : first + max(room, 1)]
        yield Rule("resources of the kubelet", style="cyan")
        yield table
        if room - len(steps) > 1:
            yield Rule("log of the agent", style="cyan")
            yield self._log_tail(room - len(steps) - 1)

    def _step_lines(self, width: int) -> tuple[list[Text], int]:
        """One line per step, with the last result below its step, and the index of that result's last line."""
        lines: list[Text] = []
        column = max(len(step.title) for step in self.steps)
        same_line = width - column >= _MIN_RESULT_WIDTH
        expanded = len(self.results) if self.failure else len(self.results) - 1
        current = 0
        for index, step in enumerate(self.steps):
            if index < len(self.results):
                text = Text.assemble(("✓ ", "bold green"), step.title)
                if same_line and index < len(self.results) - 1:
                    text.append(" " * (column - len(step.title) + 2)).append(self.results[index], "dim")
            elif index == len(self.results):
                mark = ("✗ ", "bold red") if self.failure else ("▸ ", "bold yellow")
                text = Text.assemble(mark, (step.title, "bold"))
            else:
                text = Text.assemble("  ", (step.title, "dim"))
            lines.append(text)
            if index == expanded:
                report, style = (self.failure, "red") if self.failure else (self.results[index], "cyan")
                # A separate segment for the indent: some SVG viewers drop leading spaces of a text element.
                folded = _fold(report, width - 2)[:_MAX_RESULT_LINES]
                lines.extend(Text.assemble("  ", (line, style)) for line in folded)
                current = len(lines) - 1
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines, current

    def resources(self) -> Table:
        """One row per resource of the kubelet."""
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("resource", no_wrap=True)
        table.add_column("allocatable", no_wrap=True)
        table.add_column("NUMA", no_wrap=True)
        # The only column that shrinks; the cells set no_wrap themselves.
        table.add_column("unhealthy; used by pods", overflow="ellipsis")
        pods = self.demo.pods_by_device()
        for resource, status in self.demo.kubelet.resources().items():
            ids_by_pod: dict[str, list[str]] = {}
            for id_ in status.devices:
                if pod := pods.get((resource, id_)):
                    ids_by_pod.setdefault(pod, []).append(_short(resource, id_))
            notes = [Text(f"{pod} {' '.join(ids)}") for pod, ids in ids_by_pod.items()]
            bad = [_short(resource, id_) for id_, device in status.devices.items() if not device.healthy]
            if bad:
                text = f"unhealthy {bad[0]}" if len(bad) == 1 else f"unhealthy {bad[0]} +{len(bad) - 1}"
                notes.insert(0, Text("all unhealthy" if len(bad) == len(status.devices) else text, style="bold red"))
            counts = Text(f"{status.allocatable}/{status.capacity}", style="bold red" if bad else "green")
            separator = Text("; ", no_wrap=True, overflow="ellipsis")
            numa_nodes = sorted({node for device in status.devices.values() for node in device.nodes})
            table.add_row(resource, counts, ",".join(map(str, numa_nodes)) or "-", separator.join(notes))
        return table

    def _log_tail(self, count: int) -> Text:
        try:
            with open(self.demo.log, errors="replace") as file:
                lines = list(collections.deque(file, maxlen=min(count, _MAX_LOG_LINES)))
        except FileNotFoundError:
            lines = []
        return Text("".join(lines).rstrip(), style="dim", no_wrap=True, overflow="ellipsis")


def run(*, keep: bool, svg: str = "") -> int:
    """Runs the demo. Returns 0 if every step had its effect, and 130 after Ctrl-C.

    `svg` names a file for a picture of the screen.
    """
    # The path of a Unix socket has at most 107 bytes.
    short = len(os.fsencode(tempfile.gettempdir())) <= _MAX_TMPDIR_LENGTH
    directory = tempfile.mkdtemp(prefix="accelplane-", dir=None if short else "/tmp")  # noqa: S108
    try:
        return asyncio.run(play(Demo(directory), svg))
    except KeyboardInterrupt:
        print("demo interrupted")
        return 128 + signal.SIGINT
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def play(demo: Demo, svg: str) -> int:
    """Runs and shows the steps. Returns 0 if all of them passed."""
    screen = Screen(demo, demo.steps())
    begin = time.monotonic()
    print(_INTRODUCTION, end="\n\n", flush=True)
    async with demo.running():
        if sys.stdout.isatty():
            with Live(screen, refresh_per_second=8, screen=False):
                failed = await _run_steps(screen, _MIN_STEP_SECONDS, svg)
        else:
            failed = await _run_steps(screen, 0.0, svg)
    print(f"demo {'failed' if failed else 'passed'} in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


async def _run_steps(screen: Screen, min_seconds: float, svg: str) -> bool:
    for step in screen.steps:
        begin = time.monotonic()
        try:
            result = await step.run()
        except (DemoError, TimeoutError, OSError) as error:
            screen.failure = str(error) or type(error).__name__
            print(f"FAILED  {step.title}: {screen.failure}", file=sys.stderr)
            return True
        screen.results.append(result)
        if svg and step.show_resources:
            _draw(screen, svg)
        if min_seconds:
            await asyncio.sleep(max(0.0, min_seconds - (time.monotonic() - begin)))
        else:
            print(f"ok  {step.title}", *_indent(_fold(result, _PLAIN_WIDTH - 6)), sep="\n", flush=True)
            if step.show_resources:
                _print_plain(screen)
    return False


def _print_plain(screen: Screen) -> None:
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH - 6, color_system=None).print(screen.resources())
    print("", *_indent(text.getvalue().splitlines()), "", sep="\n", flush=True)


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"      {line}".rstrip() for line in lines]


def _fold(text: str, width: int) -> list[str]:
    wrapped = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return [line for lines in wrapped for line in lines]


def _short(resource: str, id_: str) -> str:
    """The ID without the prefix that repeats the resource name."""
    return id_.removeprefix(f"{resource.partition('/')[2]}-")


def _draw(screen: Screen, path: str) -> None:
    width, height = _PICTURE_SIZE
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(screen)
    # Remove the web fonts that rich references, so that the picture loads nothing from the network.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", console.export_svg(title="make demo"), flags=re.DOTALL)
    with open(path, "w", encoding="utf-8") as file:
        file.write(picture)
