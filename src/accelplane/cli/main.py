"""`accelplane`: the commands for people; those with flags in Go's way are dispatched before click is imported."""

import sys

from accelplane.cli import signals


def main() -> None:
    """The entry point."""
    if sys.argv[1:2] == ["node"]:
        signals.end_at_once()
        from accelplane.cli.node import main as node  # noqa: PLC0415 - the agent carries no click

        sys.exit(node())
    if sys.argv[1:2] == ["labels"]:
        from accelplane.cli.labels import main as labels  # noqa: PLC0415 - each command imports its own work

        sys.exit(labels(sys.argv[2:]))
    if sys.argv[1:2] == ["operator"]:
        from accelplane.cli.operator import main as operator  # noqa: PLC0415 - each command imports its own work

        sys.exit(operator(sys.argv[2:], "accelplane operator"))
    if sys.argv[1:2] == ["fpga"]:
        from accelplane.cli.fpgatool import main as fpgatool  # noqa: PLC0415 - each command imports its own work

        sys.exit(fpgatool(sys.argv[2:], "accelplane fpga"))
    if sys.argv[1:3] == ["webhook", "sgx"]:
        from accelplane.cli.sgxwebhook import main as sgxwebhook  # noqa: PLC0415 - each command imports its own work

        sys.exit(sgxwebhook(sys.argv[3:], "accelplane webhook sgx"))
    from accelplane.cli.commands import accelplane  # noqa: PLC0415 - the agent carries no click

    accelplane()
