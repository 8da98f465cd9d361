"""Shell completion: `accelplane completion SHELL` prints the script of click for a shell.

The script calls `accelplane` with the variable `_ACCELPLANE_COMPLETE`, which click answers.
"""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
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
    click.echo(kind(context.find_root().command, {}, "accelplane", "_ACCELPLANE_COMPLETE").source())
