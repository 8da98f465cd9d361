"""`accelplane`: dispatches commands with Go-style flags before click is imported, and all others to click."""

import sys

from accelplane.cli import signals


def main() -> None:
    """The entry point."""
    if sys.argv[1:2] == ["node"]:
        signals.end_at_once()
        from accelplane.cli.node import main as node  # noqa: PLC0415 - the agent must not import click

        sys.exit(node())
    if sys.argv[1:2] == ["labels"]:
        from accelplane.cli.labels import main as labels  # noqa: PLC0415 - only this command needs it

        sys.exit(labels(sys.argv[2:]))
    if sys.argv[1:2] == ["operator"]:
        from accelplane.cli.operator import main as operator  # noqa: PLC0415 - only this command needs it

        sys.exit(operator(sys.argv[2:], "accelplane operator"))
    if sys.argv[1:2] == ["fpga"]:
        from accelplane.cli.fpgatool import main as fpgatool  # noqa: PLC0415 - only this command needs it

        sys.exit(fpgatool(sys.argv[2:], "accelplane fpga"))
    if sys.argv[1:3] == ["webhook", "sgx"]:
        from accelplane.cli.sgxwebhook import main as sgxwebhook  # noqa: PLC0415 - only this command needs it

        sys.exit(sgxwebhook(sys.argv[3:], "accelplane webhook sgx"))
    from accelplane.cli.commands import accelplane  # noqa: PLC0415 - the agent must not import click

    accelplane()
