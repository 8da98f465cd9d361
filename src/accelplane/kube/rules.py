"""Rules about the fields of a spec, with one message each for admission and for the API server.

    Rule(message=…, broken=…, cel=…)    one rule
    broken(spec, rules)                 the messages of the rules that a spec breaks
    validations(rules)                  the rules as `x-kubernetes-validations` of a definition
    is_set(path)                        CEL for: the field and all that it is in are set

`{field}` in a message stands for the value of a string field, `{field!s}` for that of another field. Both are replaced
in Python and in CEL.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from accelplane.kube.jsontypes import Json

Spec = TypeVar("Spec", bound=msgspec.Struct)

_PLACEHOLDER = re.compile(r"\{([\w.]+(?:!s)?)\}")


class Rule(msgspec.Struct, Generic[Spec], frozen=True, kw_only=True):
    """`broken` returns whether a spec breaks the rule; `cel` is the equivalent condition that must hold.

    `reason` is that of a condition, if a controller cannot realize a spec that breaks the rule.
    """

    message: str
    broken: Callable[[Spec], bool]
    cel: str = ""
    reason: str = ""


def broken(spec: Spec, rules: Iterable[Rule[Spec]]) -> Iterator[str]:
    """The messages of the rules that a spec breaks."""
    return (message for _, message in broken_rules(spec, rules))


def broken_rules(spec: Spec, rules: Iterable[Rule[Spec]]) -> Iterator[tuple[Rule[Spec], str]]:
    """The rules that a spec breaks, with their messages."""
    for rule in rules:
        if rule.broken(spec):
            yield rule, _PLACEHOLDER.sub(lambda found: _shown(spec, found[1].removesuffix("!s")), rule.message)


def validations(rules: Iterable[Rule[Spec]]) -> Iterator[Json]:
    """The rules that the API server evaluates, as entries of `x-kubernetes-validations`."""
    for rule in rules:
        if rule.cel:
            fixed = not _PLACEHOLDER.search(rule.message)
            yield {
                "rule": rule.cel,
                **({"message": rule.message} if fixed else {"messageExpression": _in_cel(rule.message)}),
            }


def is_set(path: str) -> str:
    """CEL for: the field and all that it is in are set."""
    names = path.split(".")
    return " && ".join(f"has(self.{'.'.join(names[: end + 1])})" for end in range(len(names)))


def _shown(spec: msgspec.Struct, path: str) -> str:
    value: object = spec
    for name in path.split("."):
        struct = value
        if not isinstance(struct, msgspec.Struct):
            return "unset"
        value = getattr(struct, dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))[name])
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType] - any field
    # One line, whatever the text holds.
    return ascii(value)[1:-1] if isinstance(value, str) else str(value)


def _in_cel(message: str) -> str:
    parts = _PLACEHOLDER.split(message)
    return " + ".join(_value_in_cel(part) if place % 2 else f"'{part}'" for place, part in enumerate(parts) if part)


def _value_in_cel(placeholder: str) -> str:
    # string() of a string costs the API server's budget as much as an unlimited one.
    name = placeholder.removesuffix("!s")
    return f"self.{name}" if name == placeholder else f"string(self.{name})"
