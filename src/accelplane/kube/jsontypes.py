"""JSON values as types, and values of unknown type as JSON objects and arrays."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
JsonObject: TypeAlias = dict[str, Json]


def as_mapping(value: object) -> Mapping[str, object] | None:
    """The value if it is a JSON object."""
    return msgspec.convert(value, dict[str, object]) if isinstance(value, dict) else None


def as_list(value: object) -> Sequence[object] | None:
    """The value if it is a JSON array; a tuple is one, too."""
    return msgspec.convert(value, list[object]) if isinstance(value, list | tuple) else None
