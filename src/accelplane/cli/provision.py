"""`accelplane provision plan|apply|status`: reconciles this node's QAT, DSA, IAA and DLB devices with their files.

Exit codes: 0 for success (of `status`: if every device is unchanged), 1 if something failed, 2 for an invalid command
line.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import click
from click.core import ParameterSource

from accelplane.cli.flagspelling import Group

_FAMILIES = ("qat", "idxd", "dlb")
# Each is an environment variable of the init containers, and a flag, which has precedence.
_INPUTS = (
    ("NODE_NAME", "--node-name", "Name of this node, for node-specific configuration files."),
    ("ENABLED_QAT_PF_PCIIDS", "--qat-ids", "PCI device IDs of the QAT devices to provision, separated by blanks."),
    ("QAT_VF_DRIVER", "--qat-vf-driver", "Driver of the QAT virtual functions: vfio-pci, igb_uio or none."),
    ("DEVICE_TYPE", "--device-type", "dsa or iaa for idxd, both when empty."),
    ("DSA_DRIVER", "--dsa-driver", "Driver of the DSA devices: idxd or vfio-pci."),
    ("DSA_PCI_IDS", "--dsa-ids", "PCI device IDs of the DSA devices to provision, separated by blanks."),
    ("DLB_VFS", "--dlb-vfs", "Number of virtual functions of a DLB device."),
    ("DLB_PFS", "--dlb-pfs", "DLB devices to provision: all or first."),
)

_Mode: TypeAlias = Literal["plan", "apply", "status"]
_Command = TypeVar("_Command", bound=Callable[..., None])


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Configure QAT, DSA, IAA and DLB devices.",
)
def provision() -> None:
    """Reconcile QAT, DSA, IAA and DLB devices with their configuration files.

    Without a FAMILY all of them. Exit code: 0, or 1 if a device failed (with status: if a device is not unchanged).
    """


def _inputs(command: _Command) -> _Command:
    for variable, flag, text in reversed(_INPUTS):
        command = click.option(flag, variable, envvar=variable, default="", show_envvar=True, help=text)(command)
    for decorate in (
        click.option(
            "--output",
            "-o",
            type=click.Choice(["table", "json"]),
            default="table",
            show_default=True,
            help="Output format.",
        ),
        click.option("--config-dir", default="", help="Directory of qat.conf, dsa.conf, iaa.conf, dlb.conf."),
        click.option("--root", default="/", show_default=True, help="Directory that contains sysfs and devfs."),
        click.argument("families", nargs=-1, metavar="[qat|idxd|dlb]...", type=click.Choice(_FAMILIES)),
    ):
        command = decorate(command)
    return command


_force = click.option(
    "--force", is_flag=True, help="Replace virtual functions if their number differs; disable queues in use."
)


@provision.command()
@_inputs
@_force
def plan(families: tuple[str, ...], output: str, force: bool, **inputs: str) -> None:
    """Show what apply would do, and what would prevent it. Writes nothing."""
    _run("plan", families, output, force, inputs)


@provision.command()
@_inputs
@_force
def apply(families: tuple[str, ...], output: str, force: bool, **inputs: str) -> None:
    """Write what differs, verify it, and roll back devices that cannot be finished."""
    _run("apply", families, output, force, inputs)


@provision.command()
@_inputs
def status(families: tuple[str, ...], output: str, **inputs: str) -> None:
    """Show the current state; the exit code is 0 if every device is unchanged."""
    _run("status", families, output, False, inputs)


def _run(mode: _Mode, families: tuple[str, ...], output: str, force: bool, inputs: dict[str, str]) -> None:
    root, config_dir = inputs.pop("root"), inputs.pop("config_dir")
    for flag, directory in (("--root", root), ("--config-dir", config_dir or root)):
        if not os.path.isdir(directory):
            raise click.UsageError(f"{flag}: {directory}: not a directory")
    from accelplane.cli import provisioning  # noqa: PLC0415 - each command imports its work when it is called
    from accelplane.cli.tables import print_problems  # noqa: PLC0415

    families = tuple(dict.fromkeys(families)) or _FAMILIES
    config_dir = os.path.abspath(config_dir) if config_dir else ""
    desired, problems = provisioning.parts(families, config_dir, inputs, force=force)
    if problems:
        written = ["nothing was written"] if mode == "apply" else []
        sys.exit(print_problems("accelplane provision", [*_name_flags(problems), *written]))
    sys.exit(provisioning.run(mode, desired, os.path.abspath(root), output))


def _name_flags(problems: Sequence[str]) -> list[str]:
    """The problems with the name of the flag where a flag on the command line replaces an environment variable."""
    context = click.get_current_context()
    flags = {
        str(option.envvar): option.opts[0]
        for option in context.command.params
        if option.envvar and option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }
    parts = [problem.partition(":") for problem in problems]
    return [f"{flags.get(variable, variable)}{colon}{text}" for variable, colon, text in parts]
