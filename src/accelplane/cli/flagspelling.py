"""Commands of click that accept `-root` for `--root`, as the commands with flags in the format of Go do."""

import click


class Command(click.Command):
    """A command whose long flags may begin with one hyphen."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        long = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        if not ctx.allow_interspersed_args:
            # All after the first word belongs to another program.
            end = next((place for place, word in enumerate(args[:end]) if not word.startswith("-")), end)
        given = [
            f"-{word}" if f"-{word.partition('=')[0]}" in long and word[1:2] != "-" else word for word in args[:end]
        ]
        return super().parse_args(ctx, [*given, *args[end:]])


class Group(click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type
