"""`python -m benchmarks`: runs the benchmarks in sequence, prints a table, and writes JSON.

A figure over its budget is reported, but is not a failure: a busy machine is a more frequent cause than a change of the
code. The exit code is 1 if a benchmark could not run.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.figures import Result
from benchmarks.report import Report, machine, show, write

NAMES = (
    "memory",
    "confined",
    "start",
    "plug",
    "dra",
    "allocate",
    "storm",
    "scan",
    "idle",
    "scrape",
    "pages",
    "clients",
    "restarts",
    "admission",
    "attack",
    "fpga",
    "operator",
    "fleet",
    "onload",
    "scheduler",
    "products",
    "helm",
)
_DEADLINE = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    load = os.getloadavg()[0]
    results: dict[str, Result] = {}
    failed: dict[str, str] = {}
    for name in options.only:
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            results[name] = _measure(name, quick=options.quick)
            print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
        except (subprocess.SubprocessError, msgspec.DecodeError) as error:
            failed[name] = str(error)
            print("failed", file=sys.stderr)
    report = Report(quick=options.quick, machine=machine(load), results=results, failed=failed)
    show(report)
    write(report, options.json)
    print(f"written to {options.json}", file=sys.stderr)
    return 1 if failed else 0


def _measure(name: str, *, quick: bool) -> Result:
    """Raises `subprocess.SubprocessError` and `msgspec.DecodeError`."""
    command = [sys.executable, "-m", "benchmarks.run_one", name, *(["--quick"] if quick else [])]
    env = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=_DEADLINE, check=True, env=env).stdout
    return msgspec.json.decode(output, type=Result)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure agent, webhooks and operators.")
    parser.add_argument(
        "--only", type=_names, default=NAMES, metavar="NAME,…", help=f"benchmarks to run: {', '.join(NAMES)}"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to check that the benchmarks work")
    parser.add_argument(
        "--json", default="build/benchmarks/results.json", metavar="FILE", help="output file (%(default)s)"
    )
    return parser.parse_args(arguments)


def _names(text: str) -> Sequence[str]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown benchmark {', '.join(unknown)}; expected {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
