"""`kubectl accelplane`: the plugin of kubectl, `inspect` and `top` for a cluster, and its completion.

kubectl runs `kubectl-accelplane` with the words after `accelplane`. For a completion it runs
`kubectl_complete-accelplane` with the words so far, the last one incomplete, and reads the answer of cobra: lines of
value, tab and description, and a last line with a colon and a number of flags.
"""

import sys

import click
from click.shell_completion import ShellComplete

from accelplane import __version__
from accelplane.cli.devicecommands import for_cluster, inspect, top
from accelplane.cli.flagspelling import Group

_PROGRAM = "kubectl accelplane"
_NO_FILES = 4  # cobra's ShellCompDirectiveNoFileComp
_DEFAULT = 0


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=_PROGRAM, message="%(prog)s %(version)s")
def plugin() -> None:
    """Devices of a cluster and the pods that use them or wait for them."""


# There is no node to inspect where kubectl runs.
plugin.add_command(for_cluster(inspect, "Show devices of a cluster, their holders, and waiting pods."))
plugin.add_command(for_cluster(top, "Show devices of a cluster repeatedly."))


def main() -> None:
    """The entry point `kubectl-accelplane`."""
    plugin(prog_name=_PROGRAM)


def complete() -> None:
    """The entry point `kubectl_complete-accelplane`."""
    sys.stdout.write(answer(sys.argv[1:]))


def answer(words: list[str]) -> str:
    """The completions of the last word."""
    *before, last = words or [""]
    found = ShellComplete(plugin, {}, _PROGRAM, "").get_completions(before, last)
    lines = [f"{item.value}\t{item.help}" if item.help else item.value for item in found if item.type == "plain"]
    wants_files = any(item.type != "plain" for item in found)
    return "".join(f"{line}\n" for line in (*lines, f":{_DEFAULT if wants_files else _NO_FILES}"))
