"""`python -m benchmarks.run_one NAME [--quick]`: runs one benchmark; prints its result as JSON."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import msgspec

from benchmarks.figures import Result, Scale


def load(name: str) -> ModuleType:
    """The module of a benchmark. The cluster harness imports modules of the tests by their names there."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module(f"benchmarks.{name}")


def main() -> None:
    name, *options = sys.argv[1:]
    # Output of libraries goes to standard error, so that it does not mix with the JSON.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    result: Result = load(name).measure(Scale(quick="--quick" in options))
    output.write(msgspec.json.encode(result))
    output.close()


if __name__ == "__main__":
    main()
