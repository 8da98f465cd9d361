"""The click commands of `accelplane`. Each command imports its modules when it is called."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from accelplane import __version__
from accelplane.cli import programs
from accelplane.cli.devicecommands import inspect, top
from accelplane.cli.flagspelling import Group
from accelplane.cli.manifests import manifests
from accelplane.cli.provision import provision

if TYPE_CHECKING:
    from accelplane.simulate.kernel.fpga import Outcome

SHELLS = ("bash", "zsh", "fish")
KUBELET_BEHAVIOURS = ("1.34", "1.37")  # `accelplane.kubelet.embedded.BEHAVIOURS`, without importing it


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="accelplane", message="%(prog)s %(version)s")
def accelplane() -> None:
    """Accelerators for Kubernetes: device plugins, operator, webhooks and tools."""


@accelplane.group()
def webhook() -> None:
    """Run a pod webhook without the operator."""


@accelplane.command()
@click.option("--kubelet-dir", required=True, help="Directory of the embedded kubelet, not that of a node's kubelet.")
@click.option(
    "--topology-policy",
    type=click.Choice(["none", "best-effort", "restricted", "single-numa-node"]),
    default="none",
    show_default=True,
    help="Policy of the Topology Manager.",
)
@click.option("--numa-nodes", type=click.IntRange(1, 8), default=2, show_default=True, help="Number of NUMA nodes.")
@click.option(
    "--behaviour",
    type=click.Choice(KUBELET_BEHAVIOURS),
    default=KUBELET_BEHAVIOURS[-1],
    show_default=True,
    help="Version of Kubernetes: kubelets identify a plugin by its resource until 1.36, by its socket from 1.37.",
)
def kubelet(kubelet_dir: str, topology_policy: str, numa_nodes: int, behaviour: str) -> None:
    """Run an embedded kubelet to develop a plugin without a cluster."""
    _require_simulate()
    from accelplane.cli.kubelet import run  # noqa: PLC0415

    sys.exit(run(os.path.abspath(kubelet_dir), topology_policy, numa_nodes, behaviour))


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


@accelplane.group()
def dra() -> None:
    """Dynamic resource allocation on this node."""


@dra.command("cleanup")
@click.option("--root", default="/", show_default=True, help="Read sysfs and devfs below this directory.")
@click.option("--kubelet-dir", default="/var/lib/kubelet", show_default=True, help="Directory of the kubelet.")
@click.option("--cdi-dir", default="/var/run/cdi", show_default=True, help="Directory of the CDI files.")
@click.option("--nfd-dir", default="", help="Directory with the label files of the agent, as its option nfd-dir.")
@click.option("--node", envvar="NODE_NAME", default="", help="Name of this node; default: the variable NODE_NAME.")
@click.option("--kubeconfig", type=click.Path(), default="", help="Kubeconfig file; default: as kubectl.")
@click.option("--force", is_flag=True, help="Also undo what was done for claims that are prepared.")
def dra_cleanup(*, force: bool, **options: str) -> None:
    """Remove what DRA drivers leave on a node that no longer uses them."""
    from accelplane.cli.dracleanup import run as clean_up  # noqa: PLC0415 - as above

    sys.exit(clean_up(**options, force=force))


@accelplane.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    Load it with source <(accelplane completion bash) in ~/.bashrc, source <(accelplane completion zsh) in ~/.zshrc, or
    accelplane completion fish > ~/.config/fish/completions/accelplane.fish.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    # The script calls `accelplane` with the variable `_ACCELPLANE_COMPLETE`, which click answers.
    click.echo(kind(context.find_root().command, {}, "accelplane", "_ACCELPLANE_COMPLETE").source())


def _add_program(command: str, text: str) -> None:
    """Adds a command that `main` runs without click, for help and completion."""
    group, _, name = command.rpartition(" ")
    parent = {"": accelplane, "webhook": webhook, "onload": onload}[group]
    passing: dict[str, object] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    parent.command(name, help=text, context_settings=passing)(lambda: programs.run(command))


for _command, _program in programs.PROGRAMS.items():
    _add_program(_command, _program.help)
for _other in (inspect, top, provision, manifests):
    accelplane.add_command(_other)


def _require_simulate() -> None:
    """Raises `ClickException` without grpcio: the simulated peers use the reference implementation of gRPC."""
    if importlib.util.find_spec("grpc") is None:
        raise click.ClickException("Python package grpcio not found: images do not contain it; run pip install grpcio")
    # grpcio logs every lost connection unless this is set before the import.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
