"""`python -m benchmarks`: runs them one after the other, prints a table, writes JSON.

Over budget is said, and is no failure: that the machine was busy is more often the reason than a change. The exit code
is 1 when a benchmark could not be carried out.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.figures import Outcome
from benchmarks.report import Report, machine, show, write

NAMES = (
    "memory",
    "confined",
    "start",
    "plug",
    "allocate",
    "storm",
    "scan",
    "idle",
    "scrape",
    "clients",
    "restarts",
    "admission",
    "attack",
    "fpga",
    "operator",
    "fleet",
    "onload",
    "helm",
)
_DEADLINE = 3600


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    load = os.getloadavg()[0]
    outcomes: dict[str, Outcome] = {}
    failed: dict[str, str] = {}
    for name in options.only:
        print(f"{name} …", end=" ", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            outcomes[name] = _measured(name, quick=options.quick)
            print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
        except (subprocess.SubprocessError, msgspec.DecodeError) as error:
            failed[name] = str(error)
            print("failed", file=sys.stderr)
    report = Report(quick=options.quick, machine=machine(load), outcomes=outcomes, failed=failed)
    show(report)
    write(report, options.json)
    print(f"written to {options.json}", file=sys.stderr)
    return 1 if failed else 0


def _measured(name: str, *, quick: bool) -> Outcome:
    """Raises `subprocess.SubprocessError` and `msgspec.DecodeError`."""
    command = [sys.executable, "-m", "benchmarks.one", name, *(["--quick"] if quick else [])]
    env = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=_DEADLINE, check=True, env=env).stdout
    return msgspec.json.decode(output, type=Outcome)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures agent, webhook and operator.")
    parser.add_argument(
        "--only", type=_names, default=NAMES, metavar="NAME,…", help=f"some of them: {', '.join(NAMES)}"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that everything works")
    parser.add_argument(
        "--json", default="build/benchmarks/results.json", metavar="FILE", help="where the figures go (%(default)s)"
    )
    return parser.parse_args(arguments)


def _names(text: str) -> Sequence[str]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
