"""JSON documents of any kind."""

import marshal
from typing import Any, TypeGuard, TypeVar

JsonObject = dict[str, Any]
T = TypeVar("T")


def is_object(value: object) -> TypeGuard[JsonObject]:
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


# Later versions would keep arrays and objects that a document contains twice the same in the copy.
_MARSHAL_VERSION = 2


def deep_copy(value: T) -> T:
    """A copy of the arrays and objects of a document, in a fifth of the time of `copy.deepcopy`."""
    try:
        data = marshal.dumps(value, _MARSHAL_VERSION)  # type: ignore[arg-type] # raises for other types
    except ValueError:  # a subclass of a type of JSON, such as an enumeration of strings
        return _deep_copy(value)
    return marshal.loads(data)  # noqa: S302 - the output of `dumps`


def _deep_copy(value: Any) -> Any:
    if is_object(value):
        return {name: _deep_copy(part) for name, part in value.items()}
    if is_array(value):
        return [_deep_copy(part) for part in value]
    return value
