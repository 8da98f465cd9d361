"""JSON values as types, and values of unknown type as JSON objects and arrays."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, Json]


def as_mapping(value: object) -> Mapping[str, object] | None:
    """The value if it is a JSON object."""
    return value if _is_object(value) else None


def as_list(value: object) -> Sequence[object] | None:
    """The value if it is a JSON array; a tuple is one, too."""
    return value if _is_array(value) else None


def _is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)


def _is_array(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)
