"""How many examples hypothesis generates, and at how many places of a run a fault is injected.

`make test` uses half of the examples and a third of the places, `.ci/run` all (`ACCELPLANE_THOROUGH=1`), and
`make fuzz` the number of examples in `ACCELPLANE_FUZZ` for tests without a number of their own.
"""

import os

FUZZ = os.environ.get("ACCELPLANE_FUZZ", "")
_THOROUGH = bool(FUZZ or os.environ.get("ACCELPLANE_THOROUGH"))


def examples(number: int) -> int:
    """The number of examples of a test that has `number` in a thorough run."""
    return number if _THOROUGH else number // 2


def places(number: int, first: int = 0, step: int = 1) -> range:
    """The places from 0 to `number` at which a test injects a fault: every `step`th in a thorough run.

    `first` differs between the faults of a test, so that `make test` injects them at different places.
    """
    step = step if _THOROUGH else 3 * step
    return range(first % min(step, max(number, 1)), number, step)
