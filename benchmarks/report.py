"""The report of a run with the machine's properties, as a table and as JSON."""

import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import msgspec
from rich.console import Console
from rich.table import Table

import accelplane
from benchmarks.figures import Figure, Result

_PACKAGES = ("hpack", "protobuf", "msgspec", "grpcio")


class Machine(msgspec.Struct, frozen=True):
    """Properties of the machine, the date, and the load average of one minute before and after the run."""

    date: str
    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    packages: Mapping[str, str]
    load_before: float
    load_after: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all benchmarks of a run."""

    accelplane: str = accelplane.__version__
    quick: bool
    machine: Machine
    results: Mapping[str, Result]
    failed: Mapping[str, str]


def machine(load_before: float) -> Machine:
    """The properties of this machine."""
    return Machine(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        processor=_processor(),
        cores=os.cpu_count() or 0,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: version(name) for name in _PACKAGES},
        load_before=round(load_before, 2),
        load_after=round(os.getloadavg()[0], 2),
    )


def write(report: Report, path: str) -> None:
    """Writes the report as JSON. Creates the directory if necessary."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def show(report: Report) -> None:
    """Prints the report as a table with remarks."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=170)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "figure", "measured", "spread", "n", "budget", "", "peers (measured / peer)"):
        right = title in ("measured", "spread", "n", "budget")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "figure")
    for name, result in report.results.items():
        for number, figure in enumerate(result.figures):
            table.add_row(name if not number else "", *_row(figure))
        table.add_section()
    console.print(table)
    for line in _remarks(report):
        console.print(line, markup=False)


def _row(figure: Figure) -> tuple[str, ...]:
    spread = "" if figure.low is None or figure.high is None else f"{_format(figure.low)} - {_format(figure.high)}"
    verdict = "" if figure.budget is None else "[bold red]OVER[/]" if figure.over_budget else "[green]ok[/]"
    return (
        figure.name,
        f"{_format(figure.value)} {figure.unit}".strip(),
        spread,
        str(figure.samples) if figure.samples > 1 else "",
        "" if figure.budget is None else _format(figure.budget),
        verdict,
        ", ".join(
            f"{peer} {_format(value)} ({figure.value / value:.2g} x)" for peer, value in figure.peers.items() if value
        ),
    )


def _remarks(report: Report) -> Iterator[str]:
    yield ""
    for name, result in report.results.items():
        if result.skipped:
            yield f"{name}: skipped: {result.skipped}"
        for note in result.notes:
            yield f"{name}: {note}"
    for name, problem in report.failed.items():
        yield f"{name}: FAILED: {problem}"
    host = report.machine
    packages = ", ".join(f"{name} {number}" for name, number in host.packages.items())
    yield f"accelplane {report.accelplane}, Python {host.python}, {packages}"
    yield (
        f"{host.cores} cores of {host.processor}, {host.memory_gib:g} GiB, Linux {host.kernel}, {host.date}, "
        f"load {host.load_before:g} before and {host.load_after:g} after"
    )
    over = [
        f"{name}: {figure.name}"
        for name, result in report.results.items()
        for figure in result.figures
        if figure.over_budget
    ]
    yield f"over budget: {'; '.join(over)}" if over else "all within budget"


def _format(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
