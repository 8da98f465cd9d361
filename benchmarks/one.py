"""`python -m benchmarks.one NAME [--quick]`: one benchmark in this process; its outcome as JSON on standard output."""

import importlib
import os
import sys

import msgspec

from benchmarks.figures import Outcome, Scale


def main() -> None:
    name, *options = sys.argv[1:]
    # What a library prints must not end up among the JSON.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    outcome: Outcome = importlib.import_module(f"benchmarks.{name}").measure(Scale(quick="--quick" in options))
    output.write(msgspec.json.encode(outcome))
    output.close()


if __name__ == "__main__":
    main()
