"""The click commands `inspect` and `top`: of this node, or with `--cluster` of a cluster.

`for_cluster` makes the commands of kubectl's plugin from them, which are those of a cluster only.
"""

import copy
import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import click
import msgspec

from accelplane.cli.flagspelling import Command
from accelplane.cli.tables import OUTPUTS, Format, Output, OutputError, UsageError

F = TypeVar("F", bound=Callable[..., object])

# Flags that have no meaning for the other source.
_NODE_FLAGS = ("root", "kubelet_dir", "plugins", "config", "agent", "wake")
_CLUSTER_FLAGS = (
    "namespace", "all_namespaces", "node", "resource", "waiting", "watch", "kubeconfig", "context_name",
    "request_timeout",
)  # fmt: skip
_CLUSTER_HELP = "With --cluster: "

_SHARED = (
    click.option("--root", default="/", show_default=True, help="Read sysfs and devfs below this directory."),
    click.option("--kubelet-dir", default="/var/lib/kubelet", show_default=True, help="Directory of the kubelet."),
    click.option("--plugins", default="", help="Comma-separated plugins; default: all installed ones."),
    click.option(
        "--config",
        type=click.Path(),
        default="",
        help="Configuration file of the agent, for the options of the plugins.",
    ),
    click.option(
        "--agent",
        default="",
        metavar="ADDRESS",
        help="Agent for states: HOST:PORT of its pages or the path of its socket; default: all of this node.",
    ),
    click.option(
        "--output", "-o", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format."
    ),
    click.option("--no-headers", is_flag=True, help="Print no column titles."),
    click.option("--sort-by", default="", metavar="COLUMN", help="Sort the rows by this column."),
    click.option("--cluster", is_flag=True, help="Show all nodes of a cluster, as the API server knows them."),
    click.option("--namespace", "-n", default="", help="With --cluster: pods of this namespace."),
    click.option("--all-namespaces", "-A", is_flag=True, help="With --cluster: pods of all namespaces."),
    click.option("--node", default="", help="With --cluster: this node only."),
    click.option("--resource", default="", help="With --cluster: this resource only, or those of this prefix."),
    click.option("--waiting", is_flag=True, help="With --cluster: pods that wait for devices, and the reason."),
    click.option("--kubeconfig", type=click.Path(), default="", help="With --cluster: kubeconfig file."),
    click.option("--context", "context_name", default="", help="With --cluster: context of the kubeconfig file."),
    click.option(
        "--request-timeout", default="0", help="With --cluster: time of a request, for example 30s; 0: 15 seconds."
    ),
)

_INTERVAL = click.option(
    "--interval", type=click.FloatRange(0.2, 3600), help="Seconds between updates; default: 2, with --cluster 10."
)


def _options(function: F) -> F:
    for option in reversed(_SHARED):
        function = option(function)
    return function


@click.command(cls=Command, short_help="Show devices and the pods that use them.")
@_options
@click.option("--fleet", is_flag=True, help="With --cluster: devices and their holders, from the server of the fleet.")
@click.option(
    "--fleet-namespace", default="accelplane-fleet", show_default=True, help="With --fleet: namespace of the server."
)
@click.option("--watch", "-w", is_flag=True, help="With --cluster: repeat until the command is interrupted.")
@_INTERVAL
@click.pass_context
def inspect(context: click.Context, **values: object) -> None:
    """Show the devices of this node and the pods that use them, or those of a cluster."""
    form = _format(values)
    if not values["fleet"]:
        _reject(context, ("fleet_namespace",), "found without --fleet, expected both")
    if values["cluster"]:
        _reject(context, _NODE_FLAGS, "found with --cluster, which does not use it")
        if values["interval"] is not None and not values["watch"]:
            raise click.UsageError("--interval: found without --watch, expected both")
        if values["fleet"]:
            _reject(context, ("waiting",), "found with --fleet, which does not use it")
            _run(context, lambda: _fleet(context, values, form, once=not values["watch"]))
        _run(context, lambda: _cluster(context, values, form, once=not values["watch"]))
    _reject(context, (*_CLUSTER_FLAGS, "interval", "fleet"), "found without --cluster, expected both")
    from accelplane.cli.inspect import run  # noqa: PLC0415

    _run(context, lambda: run(*_node(values), form, agent=str(values["agent"])))


@click.command(cls=Command, short_help="Show readings of devices, repeatedly.")
@_options
@click.option("--once", is_flag=True, help="Print the table once.")
@click.option("--wake", is_flag=True, help="Read devices that sleep too, which wakes them up.")
@_INTERVAL
@click.pass_context
def top(context: click.Context, **values: object) -> None:
    """Show current readings of the devices of this node, or the devices of a cluster."""
    form = _format(values)
    once = bool(values["once"])
    if values["cluster"]:
        _reject(context, _NODE_FLAGS, "found with --cluster, which does not use it")
        _run(context, lambda: _cluster(context, values, form, once=once))
    _reject(context, _CLUSTER_FLAGS, "found without --cluster, expected both")
    from accelplane.cli.top import run  # noqa: PLC0415

    interval = _interval(values, 2.0)
    _run(
        context,
        lambda: run(
            *_node(values), form, agent=str(values["agent"]), interval=interval, once=once, wake=bool(values["wake"])
        ),
    )


def for_cluster(command: click.Command, help_text: str) -> click.Command:
    """The command without the flags that are of a node only. `--cluster` is accepted and has no effect."""
    instance = copy.copy(command)
    instance.help = instance.short_help = help_text
    instance.params = [_cluster_option(each) for each in command.params if each.name not in _NODE_FLAGS]
    return instance


def _cluster_option(parameter: click.Parameter) -> click.Parameter:
    option = copy.copy(parameter)
    if isinstance(option, click.Option):
        if option.name == "cluster":
            option.default, option.hidden = True, True
        text = option.help or ""
        if text.startswith(_CLUSTER_HELP):
            text = text.removeprefix(_CLUSTER_HELP)
            option.help = text[:1].upper() + text[1:]
        elif option.name == "interval":
            option.help = "Seconds between updates; default: 10."
    return option


def _node(values: Mapping[str, object]) -> tuple[str, str, str, str]:
    """The root, the directory of the kubelet, the plugins and the configuration file."""
    root, kubelet_dir, plugins, config = (str(values[name]) for name in ("root", "kubelet_dir", "plugins", "config"))
    return os.path.abspath(root), os.path.abspath(kubelet_dir), plugins, config


def _interval(values: Mapping[str, object], default: float) -> float:
    interval = values["interval"]
    return interval if isinstance(interval, float) else default


def _cluster(context: click.Context, values: Mapping[str, object], form: Format, *, once: bool) -> int:
    from accelplane.cli import clusterview  # noqa: PLC0415 - nodes do not need the API server

    timeout = clusterview.timeout_of(str(values["request_timeout"]))
    flags = {**values, "context": values["context_name"], "timeout": timeout}
    request = msgspec.convert(flags, clusterview.Request)
    return clusterview.run(request, form, interval=_interval(values, 10.0), once=once, program=context.command_path)


def _fleet(context: click.Context, values: Mapping[str, object], form: Format, *, once: bool) -> int:
    from accelplane.cli import clusterview, fleetview  # noqa: PLC0415 - nodes do not need the fleet

    fleetview.check_target(str(values["fleet_namespace"]))
    if values["namespace"] and values["all_namespaces"]:
        raise UsageError("-n and -A: found both, expected one of them")
    timeout = clusterview.timeout_of(str(values["request_timeout"]))
    flags = {**values, "context": values["context_name"], "timeout": timeout}
    request = msgspec.convert(flags, fleetview.FleetRequest)
    return fleetview.run(request, form, interval=_interval(values, 10.0), once=once, program=context.command_path)


def _format(values: Mapping[str, object]) -> Format:
    output: Output = next(name for name in OUTPUTS if name == values["output"])
    return Format(output=output, headers=not values["no_headers"], sort_by=str(values["sort_by"]))


def _reject(context: click.Context, names: tuple[str, ...], problem: str) -> None:
    """Raises `UsageError` of click for a flag that was given and has no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise click.UsageError(f"--{name.removesuffix('_name').replace('_', '-')}: {problem}")


def _run(context: click.Context, command: Callable[[], int]) -> None:
    """Ends the process with the exit code of the command."""
    try:
        code = command()
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    except OutputError as error:
        print(f"{context.command_path}: {error}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - otherwise the exit writes the rest again
        code = 1
    except KeyboardInterrupt:
        code = 0
    sys.exit(code)
