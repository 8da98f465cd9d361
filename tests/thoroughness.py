"""How many examples hypothesis generates.

`make test` uses half of them, `.ci/run` all (`ACCELPLANE_THOROUGH=1`), and `make fuzz` the number in `ACCELPLANE_FUZZ`
for tests without a number of their own.
"""

import os

FUZZ = os.environ.get("ACCELPLANE_FUZZ", "")
_THOROUGH = bool(FUZZ or os.environ.get("ACCELPLANE_THOROUGH"))


def examples(number: int) -> int:
    """The number of examples of a test that has `number` in a thorough run."""
    return number if _THOROUGH else number // 2
