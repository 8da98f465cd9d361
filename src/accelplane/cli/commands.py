"""The click commands of `accelplane`. Each command imports its modules when it is called."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import click

from accelplane import __version__
from accelplane.cli.completion import completion
from accelplane.cli.devicecommands import inspect, top
from accelplane.cli.manifests import manifests
from accelplane.cli.provision import provision

if TYPE_CHECKING:
    from accelplane.simulate.kernel.fpga import Outcome

_KUBELET_DIR = click.option(
    "--kubelet-dir", default="/var/lib/kubelet", show_default=True, help="Directory of the kubelet."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="accelplane", message="%(prog)s %(version)s")
def accelplane() -> None:
    """Accelerators for Kubernetes: device plugins, operator, webhooks and tools."""


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def node() -> None:
    """Run the agent with all plugins."""
    from accelplane.cli.node import main  # noqa: PLC0415

    sys.exit(main())


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def labels() -> None:
    """Print the hardware labels of a node, or write them to the Node."""
    from accelplane.cli.labels import main  # noqa: PLC0415

    sys.exit(main(sys.argv[2:]))


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def clients() -> None:
    """Serve the use of GPUs by containers to the agent. Needs the host's PID namespace and SYS_PTRACE."""
    from accelplane.cli.clients import main  # noqa: PLC0415

    sys.exit(main(sys.argv[2:]))


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def operator() -> None:
    """Run the operator, or render custom resources (render FILE)."""
    from accelplane.cli.operator import main  # noqa: PLC0415

    sys.exit(main(sys.argv[2:]))


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def fpga() -> None:
    """Inspect FPGA cards, install bitstreams, program cards."""
    from accelplane.cli.fpgatool import main  # noqa: PLC0415

    sys.exit(main(sys.argv[2:], "accelplane fpga"))


@accelplane.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def fleet() -> None:
    """Serve a page of the cluster's accelerators, or of a simulated cluster (demo)."""
    from accelplane.cli.fleet import main  # noqa: PLC0415

    sys.exit(main(sys.argv[2:]))


@accelplane.group()
def webhook() -> None:
    """Run a pod webhook without the operator."""


@webhook.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def sgx() -> None:
    """Add SGX devices and settings to pods that request EPC."""
    from accelplane.cli.sgxwebhook import main  # noqa: PLC0415

    sys.exit(main(sys.argv[3:], "accelplane webhook sgx"))


@webhook.command(
    "fpga", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def fpga_webhook() -> None:
    """Replace names of FPGA functions in pods by resources and settings."""
    from accelplane.cli.fpgawebhook import main  # noqa: PLC0415

    sys.exit(main(sys.argv[3:], "accelplane webhook fpga"))


@accelplane.command()
@_KUBELET_DIR
@click.option(
    "--topology-policy",
    type=click.Choice(["none", "best-effort", "restricted", "single-numa-node"]),
    default="none",
    show_default=True,
    help="Policy of the Topology Manager.",
)
@click.option("--numa-nodes", type=click.IntRange(1, 8), default=2, show_default=True, help="Number of NUMA nodes.")
def kubelet(kubelet_dir: str, topology_policy: str, numa_nodes: int) -> None:
    """Run an embedded kubelet to develop a plugin without a cluster."""
    _require_simulate()
    from accelplane.cli.kubelet import run  # noqa: PLC0415

    sys.exit(run(os.path.abspath(kubelet_dir), topology_policy, numa_nodes))


@accelplane.command()
@click.option("--keep", is_flag=True, help="Keep the directory of the simulated node and print its path.")
@click.option("--svg", default="", metavar="FILE", help="Write a picture of the screen to FILE.")
def demo(keep: bool, svg: str) -> None:
    """Run the agent on a simulated node with an embedded kubelet."""
    _require_simulate()
    from accelplane.cli.demo import run  # noqa: PLC0415

    sys.exit(run(keep=keep, svg=svg))


@accelplane.group()
def simulate() -> None:
    """Run a command with simulated hardware."""


@simulate.command("fpga", context_settings={"allow_interspersed_args": False})
@click.option("--description", default="", metavar="FILE", help="YAML description of the node; default: one card.")
@click.option(
    "--outcome",
    "outcomes",
    multiple=True,
    type=click.Choice(["EIO", "EBUSY", "EAGAIN", "EINVAL", "ENODEV", "hang", "half", "crash", "other"]),
    help="Result of the next programming operation; repeat the option for later operations.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def simulated_fpgas(description: str, outcomes: "tuple[Outcome, ...]", command: tuple[str, ...]) -> None:
    """Run COMMAND with simulated FPGA cards that can be programmed. Needs root."""
    if importlib.util.find_spec("accelplane.simulate.kernel") is None:
        raise click.ClickException(
            "module accelplane.simulate.kernel not found: images do not contain it; install the wheel"
        )
    from accelplane.cli.simulate import run_with_fpgas  # noqa: PLC0415

    sys.exit(run_with_fpgas(command, description, outcomes))


@accelplane.group()
def onload() -> None:
    """Tools for Onload."""


@onload.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def profile() -> None:
    """Print Onload profiles as ConfigMaps."""
    from accelplane.cli.onloadprofile import main  # noqa: PLC0415

    sys.exit(main(sys.argv[3:], "accelplane onload profile"))


accelplane.add_command(inspect)
accelplane.add_command(top)
accelplane.add_command(completion)
accelplane.add_command(provision)
accelplane.add_command(manifests)


def _require_simulate() -> None:
    """Raises `ClickException` without grpcio: the simulated peers use the reference implementation of gRPC."""
    if importlib.util.find_spec("grpc") is None:
        raise click.ClickException("Python package grpcio not found: images do not contain it; run pip install grpcio")
    # grpcio logs every lost connection unless this is set before the import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
