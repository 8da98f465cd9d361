"""`accelplane`: runs commands with Go-style flags before click is imported, and all others with click."""

import sys

from accelplane.cli import signals
from accelplane.cli.programs import PROGRAMS, run


def main() -> None:
    if sys.argv[1:2] == ["node"]:
        signals.end_at_once()
    for command in (" ".join(sys.argv[1:2]), " ".join(sys.argv[1:3])):
        if command in PROGRAMS:
            run(command)
    from accelplane.cli.commands import accelplane  # noqa: PLC0415 - the agent must not import click

    accelplane()
