"""A parser for command lines with the rules of Go's `flag` package, so that existing manifests need no change.

`-x`, `--x`, `-x=v` and `-x v` are equivalent. Booleans are `-x` or `-x=true` and never consume the next argument.
Parsing stops at the first argument that is not a flag, or after `--`. An unknown flag prints the usage and exits with
2, `-h` with 0.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from msgspec import Struct

Value = str | int | float | bool
Kind = Literal["string", "int", "uint", "float", "bool"]

_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))
# Go's literals: ASCII only, no white space, octal with a leading zero, underscores only between digits.
_INTEGER = re.compile(r"[+-]?(0[xX](_?[0-9a-fA-F])+|0[bB](_?[01])+|0[oO](_?[0-7])+|0(_?[0-7])+|0|[1-9](_?[0-9])*)")
_OCTAL = re.compile(r"[+-]?0[0-7_]+")
_FLOAT = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE
)
_KINDS: Mapping[type, Kind] = {str: "string", int: "int", float: "float", bool: "bool"}


class FlagError(Exception):
    """The command line is invalid. The message is for the user."""


class HelpRequested(Exception):
    """`-h`, `-help` or `--help` was given."""


class Flag(NamedTuple):
    """One flag. The type of `default` determines the kind. Values of an `unsigned` flag have no sign.

    Multiple occurrences of a `repeated` flag are joined with `separator`. For other flags the last occurrence counts.
    `environment` is the variable whose value a string flag has if it is not given.
    """

    name: str
    default: Value
    help: str = ""
    unsigned: bool = False
    repeated: bool = False
    environment: str = ""
    separator: str = ","

    @property
    def kind(self) -> Kind:
        return "uint" if self.unsigned else _KINDS[type(self.default)]


def flags_of(config: "type[Struct]") -> list[Flag]:
    """Returns a flag for each field of type str, int, float or bool. Integers with a minimum of 0 are unsigned."""
    import msgspec  # noqa: PLC0415 - not available in the FPGA hook and tool

    flags: list[Flag] = []
    for field in msgspec.structs.fields(config):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if isinstance(default, (str, int, float, bool)):
            metas = [meta for meta in get_args(field.type) if isinstance(meta, msgspec.Meta)]
            description = next((meta.description for meta in metas if meta.description), "")
            unsigned = type(default) is int and any(meta.ge == 0 for meta in metas)
            flags.append(Flag(field.encode_name, default, description, unsigned))
    return flags


def parse(flags: Iterable[Flag], arguments: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Returns the values of the given flags and the remaining arguments. Raises `FlagError` or `HelpRequested`."""
    known = {flag.name: flag for flag in flags}
    given: dict[str, Value] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, text = word[2 if word.startswith("--") else 1 :].partition("=")
        if not name or name.startswith("-"):
            raise FlagError(f"bad flag syntax: {word}")
        flag = known.get(name)
        if flag is None:
            if name in ("h", "help"):
                raise HelpRequested
            raise FlagError(f"flag provided but not defined: -{name}")
        if not equals:
            if flag.kind == "bool":
                text = "true"
            elif words:
                text = words.pop(0)
            else:
                raise FlagError(f"flag needs an argument: -{name}")
        if flag.repeated and name in given:
            text = f"{given[name]}{flag.separator}{text}"
        given[name] = _value(flag, text)
    return given, words


def with_defaults(
    flags: Iterable[Flag], given: Mapping[str, Value], environment: Mapping[str, str]
) -> dict[str, Value]:
    """Returns the value of every flag: the given one, or that of its variable unless empty, or the default."""
    variables = {flag.name: environment.get(flag.environment) or flag.default for flag in flags}
    return variables | dict(given)


def usage(program: str, flags: Iterable[Flag]) -> str:
    """Returns the help text with the flags in alphabetical order."""
    lines = [f"Usage of {program}:"]
    for flag in sorted(flags, key=lambda flag: flag.name):
        lines.append(f"  -{flag.name}" + ("" if flag.kind == "bool" else f" {flag.kind}"))
        value = f'"{flag.default}"' if flag.kind == "string" else go_text(flag.default)
        default = f" (default {value})" if flag.default else ""
        variable = f" (environment {flag.environment})" if flag.environment else ""
        lines.append(f"    \t{flag.help}{default}{variable}")
    return "\n".join(lines)


def parse_or_exit(
    program: str, flags: Sequence[Flag], arguments: Sequence[str] | None, *, lenient: bool = False
) -> dict[str, Value]:
    """Like `parse`, but prints errors and exits like a Go program. None stands for the arguments of the process.

    Rejects arguments after the flags. With `lenient` it ignores them with a message, as Go programs ignore them.
    """
    try:
        given, words = parse(flags, sys.argv[1:] if arguments is None else arguments)
        if words and not lenient:
            raise FlagError(f"unexpected argument {words[0]!r}: flags only, booleans as -flag or -flag=true")
        if words:
            print(f"{program}: ignored: {' '.join(words)} (booleans are -flag or -flag=false)", file=sys.stderr)
    except HelpRequested:
        print(usage(program, flags), file=sys.stderr)
        raise SystemExit(0) from None
    except FlagError as error:
        print(f"{error}\n{usage(program, flags)}", file=sys.stderr)
        raise SystemExit(2) from None
    return given


def _value(flag: Flag, text: str) -> Value:
    try:
        match flag.kind:
            case "string":
                return text
            case "bool":
                if text not in _TRUE | _FALSE:
                    raise ValueError("expected true or false")
                return text in _TRUE
            case "int":
                return _integer(text, -(2**63), 2**63 - 1)
            case "uint":
                if text[:1] in ("+", "-"):
                    raise ValueError("expected a number without a sign")
                return _integer(text, 0, 2**64 - 1)
            case "float":
                return _number(text)
    except ValueError as error:
        raise FlagError(f"invalid value {text!r} for flag -{flag.name}: {error}") from None


def _integer(text: str, least: int, most: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError("expected an integer" if least else "expected a number without a sign")
    digits = text.replace("_", "")
    # Longer numbers are out of range in every base, and int() rejects very long ones.
    number = int(digits, 8 if _OCTAL.fullmatch(digits) else 0) if len(digits.lstrip("+-0")) <= 66 else 2**64
    if not least <= number <= most:
        raise ValueError("does not fit into 64 bits")
    return number


def _number(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise ValueError("expected a number")
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise ValueError("does not fit into 64 bits")
    return number


def go_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
