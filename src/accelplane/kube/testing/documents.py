"""JSON documents of any kind."""

from typing import Any, TypeGuard

JsonObject = dict[str, Any]


def is_object(value: object) -> TypeGuard[JsonObject]:
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)
