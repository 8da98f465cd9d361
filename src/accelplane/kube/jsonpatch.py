"""JSON Patch (RFC 6902), as admission answers and patches of objects need it: small, and only of what changes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Word = str | int


class Operation(Struct, frozen=True):
    """One step of a patch."""

    op: Literal["add", "replace", "test", "remove"]
    path: str
    value: object | UnsetType = UNSET


@functools.lru_cache(maxsize=1024)  # objects of a kind are changed at the same few places
def pointer(*words: Word) -> str:
    """The JSON pointer (RFC 6901) through these keys and indexes."""
    return "".join("/" + str(word).replace("~", "~0").replace("/", "~1") for word in words)


def put(parent: Sequence[Word], current: Mapping[str, object] | None, wanted: Mapping[str, object]) -> list[Operation]:
    """What makes the mapping at `parent` hold `wanted`, whatever else is in it; it is made when it is None.

    Nothing when all of it is there already.
    """
    if not wanted:
        return []
    if current is None:
        return [Operation("add", pointer(*parent), dict(wanted))]
    return [
        Operation("replace" if key in current else "add", pointer(*parent, key), value)
        for key, value in wanted.items()
        if key not in current or current[key] != value
    ]


def append(parent: Sequence[Word], current: Sequence[object] | None, values: Sequence[object]) -> list[Operation]:
    """What puts `values` at the end of the list at `parent`, which is made when it is None."""
    if not values:
        return []
    if current is None:
        return [Operation("add", pointer(*parent), list(values))]
    return [Operation("add", pointer(*parent, "-"), value) for value in values]


def documents(operations: Sequence[Operation]) -> list[dict[str, object]]:
    """The patch as whoever sends it encodes it."""
    return [
        {"op": one.op, "path": one.path} | ({} if one.value is UNSET else {"value": one.value}) for one in operations
    ]
