"""`python -m benchmarks.run_one NAME [--quick]`: runs one benchmark; prints its result as JSON."""

import importlib
import os
import sys

import msgspec

from benchmarks.figures import Result, Scale


def main() -> None:
    name, *options = sys.argv[1:]
    # Output of libraries goes to standard error, so that it does not mix with the JSON.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    result: Result = importlib.import_module(f"benchmarks.{name}").measure(Scale(quick="--quick" in options))
    output.write(msgspec.json.encode(result))
    output.close()


if __name__ == "__main__":
    main()
