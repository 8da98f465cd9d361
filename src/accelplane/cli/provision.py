"""`accelplane provision plan|apply|status`: brings this node's QAT, DSA, IAA and DLB devices into the wanted state.

Exit codes: 0 when all is well (of `status`: when everything is as wanted), 1 when something failed, 2 for a command
line that makes no sense.
"""

import os
import sys
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import click

_FAMILIES = ("qat", "idxd", "dlb")
# Each is an environment variable of the init containers, and a flag, which wins.
_INPUTS = (
    ("NODE_NAME", "--node-name", "This node's name, for configuration files of its own."),
    ("ENABLED_QAT_PF_PCIIDS", "--qat-ids", "PCI ids of the QAT devices that are meant, with blanks between."),
    ("QAT_VF_DRIVER", "--qat-vf-driver", "Who gets QAT's virtual functions: vfio-pci, igb_uio or none."),
    ("DEVICE_TYPE", "--device-type", "dsa or iaa for idxd, both when empty."),
    ("DSA_DRIVER", "--dsa-driver", "Who gets the DSA devices: idxd or vfio-pci."),
    ("DSA_PCI_IDS", "--dsa-ids", "PCI ids of the DSA devices that are meant, with blanks between."),
    ("DLB_VFS", "--dlb-vfs", "How many virtual functions a DLB device gets."),
    ("DLB_PFS", "--dlb-pfs", "Which DLB devices are meant: all or first."),
)

_Mode: TypeAlias = Literal["plan", "apply", "status"]
_Command = TypeVar("_Command", bound=Callable[..., None])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def provision() -> None:
    """Bring QAT, DSA, IAA and DLB devices into the state that their configuration files want.

    Without a FAMILY all of them. Exit code: 0, or 1 when something failed (with status: when not all is as wanted).
    """


def _inputs(command: _Command) -> _Command:
    for variable, flag, told in reversed(_INPUTS):
        command = click.option(flag, variable, envvar=variable, default="", show_envvar=True, help=told)(command)
    for decorate in (
        click.option(
            "--output",
            "-o",
            type=click.Choice(["table", "json"]),
            default="table",
            show_default=True,
            help="Form of the answer.",
        ),
        click.option("--config-dir", default="", help="Directory of qat.conf, dsa.conf, iaa.conf, dlb.conf."),
        click.option("--root", default="/", show_default=True, help="Find sysfs and devfs under this directory."),
        click.argument("families", nargs=-1, metavar="[qat|idxd|dlb]...", type=click.Choice(_FAMILIES)),
    ):
        command = decorate(command)
    return command


_force = click.option(
    "--force", is_flag=True, help="Replace virtual functions that are there in another number, disable queues in use."
)


@provision.command()
@_inputs
@_force
def plan(families: tuple[str, ...], output: str, force: bool, **inputs: str) -> None:
    """Show what apply would do, and what stands against it. Nothing is written."""
    _run("plan", families, output, force, inputs)


@provision.command()
@_inputs
@_force
def apply(families: tuple[str, ...], output: str, force: bool, **inputs: str) -> None:
    """Write what differs, look whether it took effect, and take back what could not be finished."""
    _run("apply", families, output, force, inputs)


@provision.command()
@_inputs
def status(families: tuple[str, ...], output: str, **inputs: str) -> None:
    """Show what is there now; the exit code is 0 when it is as wanted."""
    _run("status", families, output, False, inputs)


def _run(mode: _Mode, families: tuple[str, ...], output: str, force: bool, inputs: dict[str, str]) -> None:
    root, config_dir = inputs.pop("root"), inputs.pop("config_dir")
    for flag, directory in (("--root", root), ("--config-dir", config_dir or root)):
        if not os.path.isdir(directory):
            raise click.UsageError(f"{flag} {directory}: not a directory")
    from accelplane.cli import provisioning  # noqa: PLC0415 - each command imports its work when it is called

    families = tuple(dict.fromkeys(families)) or _FAMILIES
    config_dir = os.path.abspath(config_dir) if config_dir else ""
    wanted, problems = provisioning.parts(families, config_dir, inputs, force=force)
    for problem in problems:
        print(f"accelplane provision: {problem}", file=sys.stderr)
    if problems:
        if mode == "apply":
            print("accelplane provision: nothing was written", file=sys.stderr)
        sys.exit(provisioning.FAILED)
    sys.exit(provisioning.run(mode, wanted, os.path.abspath(root), output))
