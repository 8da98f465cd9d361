"""JSON Patch (RFC 6902) for responses of admission and patches of objects."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

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


def put(parent: Sequence[Word], current: Mapping[str, object] | None, desired: Mapping[str, object]) -> list[Operation]:
    """The operations that set the `desired` members of the mapping at `parent`, which is created if it is None.

    Empty if all members are equal already.
    """
    if not desired:
        return []
    if current is None:
        return [Operation("add", pointer(*parent), dict(desired))]
    return [
        Operation("replace" if key in current else "add", pointer(*parent, key), value)
        for key, value in desired.items()
        if key not in current or current[key] != value
    ]


def append(parent: Sequence[Word], current: Sequence[object] | None, values: Sequence[object]) -> list[Operation]:
    """The operations that append `values` to the list at `parent`, which is created if it is None."""
    if not values:
        return []
    if current is None:
        return [Operation("add", pointer(*parent), list(values))]
    return [Operation("add", pointer(*parent, "-"), value) for value in values]


def documents(operations: Sequence[Operation]) -> list[dict[str, object]]:
    """The operations as JSON objects."""
    return [
        {"op": one.op, "path": one.path} | ({} if one.value is UNSET else {"value": one.value}) for one in operations
    ]


class PatchTooLargeError(Exception):
    """A patch exceeds its limit of size."""


class PatchBuilder:
    """A patch that is encoded operation by operation: a long list of operations takes three times its text."""

    # An object that needs more is larger than what etcd stores by default (1.5 MiB).
    LIMIT = 2 * 1024 * 1024

    def __init__(self) -> None:
        self._text = bytearray()

    def add(self, operations: Iterable[Operation]) -> None:
        """Raises `PatchTooLargeError`."""
        for operation in operations:
            self._text += b"," if self._text else b"["
            self._text += _ENCODER.encode(operation)
            if len(self._text) > self.LIMIT:
                raise PatchTooLargeError(f"the patch exceeds {self.LIMIT} bytes")

    def build(self) -> Raw | Sequence[Operation]:
        """The patch. Nothing can be added later."""
        if not self._text:
            return ()
        self._text += b"]"
        return Raw(self._text)


_ENCODER = msgspec.json.Encoder()
