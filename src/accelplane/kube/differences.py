"""Differences between a desired object and the object that the API server has, and who manages the fields that differ.

    differences(desired, found)                 the fields of `desired` that `found` lacks or has otherwise
    managers_of(difference, managed_fields)     the field managers that own what was found
    with_found(desired, differences)            `desired` with the found values of these fields

Fields that `desired` does not have are not compared: others may add them. Two objects are equal here if the API server
treats them as equal: quantities are compared as numbers, and elements of associative lists by their keys.

Facts: the list types and map types of the Kubernetes API (`x-kubernetes-list-type`), the fieldsV1 format of
`metadata.managedFields`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from .jsontypes import as_list, as_mapping
from .quantities import number_of

# The keys of associative lists of the core API. Other lists are atomic: they are compared as one value.
_LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_QUANTITIES = ("limits", "requests")
# Atomic maps: a key that `desired` lacks is a difference.
_ATOMIC_MAPS = ("nodeSelector",)
_LONGEST_SHOWN = 80


class Item(NamedTuple):
    """An element of an associative list in a path."""

    key: str
    value: str


Path: TypeAlias = "tuple[str | Item, ...]"


class Difference(msgspec.Struct, frozen=True):
    """A field that differs from the desired object: another value, missing, or extra in an atomic map."""

    path: Path
    found: object = None
    expected: object = None
    is_missing: bool = False
    is_extra: bool = False

    @property
    def field(self) -> str:
        """The path in the notation of messages: `spec.containers.main.image`."""
        parts = (each.value if isinstance(each, Item) else each for each in self.path)
        return "".join(f"[{each}]" if "." in each or "/" in each else f".{each}" for each in parts).removeprefix(".")

    def __str__(self) -> str:
        if self.is_missing:
            return f"{self.field}: missing, expected {_shown(self.expected)}"
        return (
            f"{self.field}: found {_shown(self.found)}, expected {'none' if self.is_extra else _shown(self.expected)}"
        )


def differences(desired: Mapping[str, object], found: Mapping[str, object]) -> tuple[Difference, ...]:
    """The fields of `desired` that `found` lacks or has with another value. Null in `desired` means any value."""
    return tuple(_differences(desired, found, ()))


def managers_of(difference: Difference, managed_fields: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """The names of the managers that own the field, or, for a missing field, none."""
    return tuple(dict.fromkeys(str(entry.get("manager", "")) for entry in managed_fields if _owns(entry, difference)))


def with_found(desired: Mapping[str, object], some: Iterable[Difference]) -> Mapping[str, object]:
    """A copy of `desired` with the found values of fields that differ: a write of it leaves them unchanged."""
    result: object = desired
    for each in some:
        result = _with_found(result, each.path, each)
    return as_mapping(result) or {}


def _with_found(value: object, path: Path, difference: Difference) -> object:
    head, rest = path[0], path[1:]
    if isinstance(head, Item):
        items: list[object] = []
        for each in as_list(value) or ():
            if str((as_mapping(each) or {}).get(head.key)) != head.value:
                items.append(each)
            elif rest:
                items.append(_with_found(each, rest, difference))
        return items
    fields = dict(as_mapping(value) or {})
    if rest:
        fields[head] = _with_found(fields.get(head), rest, difference)
    elif difference.is_missing:
        fields.pop(head, None)
    else:
        fields[head] = difference.found
    return fields


def _differences(desired: object, found: object, path: Path) -> Iterator[Difference]:
    if desired == found:  # almost all parts, and much faster
        return
    key = path[-1] if path else ""
    fields, current = as_mapping(desired), as_mapping(found)
    if fields is not None and current is not None:
        for name, value in fields.items():
            if value is None:
                continue
            if current.get(name) is None:
                # The API server omits empty strings and lists. Empty objects may mean something: `emptyDir: {}`.
                if value in ("", [], ()):
                    continue
                yield Difference((*path, name), expected=value, is_missing=True)
            else:
                yield from _differences(value, current[name], (*path, name))
        for name in sorted(current.keys() - fields.keys()) if key in _ATOMIC_MAPS else ():
            yield Difference((*path, name), found=current[name], is_extra=True)
        return
    items, present = as_list(desired), as_list(found)
    if items is not None and present is not None and isinstance(key, str) and key in _LIST_KEYS:
        yield from _item_differences(items, present, path, _LIST_KEYS[key][0])
    elif not _is_equal(desired, found, path):
        yield Difference(path, found=found, expected=desired)


def _item_differences(desired: Sequence[object], found: Sequence[object], path: Path, key: str) -> Iterator[Difference]:
    current = {str(item.get(key)): item for each in found if (item := as_mapping(each)) is not None}
    for each in desired:
        item = Item(key, str((as_mapping(each) or {}).get(key)))
        if item.value not in current:
            yield Difference((*path, item), expected=each, is_missing=True)
        else:
            yield from _differences(each, current[item.value], (*path, item))


def _is_equal(desired: object, found: object, path: Path) -> bool:
    if len(path) > 1 and path[-2] in _QUANTITIES:
        return _amount(desired) == _amount(found)
    items, present = as_list(desired), as_list(found)
    if items is not None and present is not None:
        # A tuple equals a list with the same elements: both are the same JSON.
        return msgspec.json.encode(items, order="sorted") == msgspec.json.encode(present, order="sorted")
    return desired == found


def _amount(value: object) -> object:
    return number_of(value) if isinstance(value, int | str) else value


def _owns(entry: Mapping[str, object], difference: Difference) -> bool:
    """Whether an entry of the managed fields has the field, or a field or element in it."""
    fields = as_mapping(entry.get("fieldsV1"))
    for part in difference.path:
        if fields is None:
            return False
        name = f"k:{msgspec.json.encode({part.key: part.value}).decode()}" if isinstance(part, Item) else f"f:{part}"
        if name not in fields:
            # The owner of an atomic list or map owns all that is in it.
            return not fields and part != difference.path[0]
        fields = as_mapping(fields[name])
    return True


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
