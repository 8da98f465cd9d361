"""`intel_gpu_fakedev`: creates fake GPU devices in the current directory from a JSON description."""

import sys
from collections.abc import Sequence

import msgspec

from accelplane.cli.goflags import Flag, FlagError, HelpRequested, parse, usage
from accelplane.simulate.description import DescriptionError, read_description
from accelplane.simulate.fakedev import FakedevError, generate

PROGRAM = "intel_gpu_fakedev"
FLAGS = (
    Flag("json", "", "JSON description of the devices"),
    Flag("verbose", False, "print each created device"),
    Flag("unprivileged", False, "create plain files instead of device nodes"),
    Flag("seed", 0, "seed for shuffling entries without a fixed order"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 for any error."""
    try:
        given, words = parse(FLAGS, sys.argv[1:] if arguments is None else arguments)
        if words:
            raise FlagError(f"unexpected argument {words[0]!a}: flags only")
        if not given.get("json"):
            raise FlagError("-json: found nothing, expected the file with the description")
        description = read_description(str(given["json"]))
        description = msgspec.structs.replace(
            description,
            unprivileged=bool(given.get("unprivileged")) or description.unprivileged,
            seed=int(given["seed"]) if "seed" in given else description.seed,
        )
        print(f"{description.devcount} GPUs: {description.info}")
        lines = generate(description, ".", print if given.get("verbose") else None)
    except HelpRequested:
        print(usage(PROGRAM, FLAGS), file=sys.stderr)
        return 0
    except FlagError as error:
        print(f"{error}\n{usage(PROGRAM, FLAGS)}", file=sys.stderr)
        return 1
    except (DescriptionError, FakedevError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0
