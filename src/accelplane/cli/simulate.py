"""`accelplane simulate`: runs an unmodified command with simulated hardware."""

from collections.abc import Sequence

import click

from accelplane.simulate.description import DescriptionError
from accelplane.simulate.journal import TreeError
from accelplane.simulate.kernel.fpga import Outcome
from accelplane.simulate.kernel.fuse import FuseUnavailable
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.namespace import emulated_namespace
from accelplane.simulate.offload import FpgaSpec
from accelplane.simulate.seccomp import SeccompUnavailable
from accelplane.simulate.seccomp import run as supervised
from accelplane.simulate.specs import NodeSpec


def run_with_fpgas(command: Sequence[str], description: str, outcomes: Sequence[Outcome]) -> int:
    """Runs the command with simulated FPGA cards. Returns its exit code. Raises `click.ClickException`."""
    try:
        spec = NodeSpec.load(description) if description else NodeSpec(fpgas=[FpgaSpec()])
        kernel = Kernel(spec)
        for card in kernel.fpgas():
            card.outcomes.extend(outcomes)
        with emulated_namespace(kernel) as sockets:
            return supervised(command, sockets)
    except (DescriptionError, TreeError, FuseUnavailable, SeccompUnavailable, OSError) as error:
        raise click.ClickException(str(error)) from None
