"""Ownership of fields: `metadata.managedFields` and server-side apply.

A field is a path of elements as in the FieldsV1 format: `f:NAME` for a member, `k:{KEYS}` for an item of an
associative list, `v:VALUE` for an item of a set. The API server knows from its schemas which lists are associative and
which maps are atomic. This module knows them by name; all other lists are atomic, and all other maps are not.

Facts: Kubernetes documentation, "Server-Side Apply".
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from .documents import JsonObject, deep_copy, is_array, is_object

Path = tuple[str, ...]

_LIST_KEYS: Mapping[str, str] = {
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = frozenset({"finalizers"})
_ATOMIC_MAPS = frozenset({"nodeSelector"})
_UNMANAGED = frozenset({
    "creationTimestamp", "deletionTimestamp", "generation", "managedFields", "name", "namespace", "resourceVersion",
    "uid",
})  # fmt: skip
# The item of an associative list itself.
_SELF = "."


class Manager(NamedTuple):
    """A field manager, with its operation `Apply` or `Update`, and the subresource that it writes."""

    name: str
    operation: str
    subresource: str = ""


class FieldConflict(Struct, frozen=True):
    """A field that another manager owns with another value."""

    manager: Manager
    field: str


class ApplyConflict(Exception):
    """An apply without force would change fields of other managers."""

    def __init__(self, conflicts: list[FieldConflict]) -> None:
        super().__init__(f"Apply failed with {len(conflicts)} conflicts")
        self.conflicts = conflicts


def apply(live: JsonObject, body: JsonObject, manager: Manager, *, force: bool) -> JsonObject:
    """The live object after a server-side apply of `body`. Raises `ApplyConflict`."""
    owners = _owners(live)
    values = _field_values(body)
    fields = set(values)
    conflicts = [
        (other, path)
        for other, owned in owners.items()
        if other != manager
        for path in sorted(owned & fields)
        if _differs(live, path, values[path])
    ]
    if conflicts and not force:
        raise ApplyConflict([FieldConflict(other, _text(path)) for other, path in conflicts])
    for other, path in conflicts:
        owners[other].discard(path)
    dropped = owners.get(manager, set[Path]()) - fields
    owners[manager] = fields
    result = deep_copy(live)
    # Inner fields first, but an item before its fields: without its key it could not be found.
    for path in sorted(dropped, key=lambda path: (-len(path), path[-1] != _SELF)):
        if not any(_covers(path, other) for owned in owners.values() for other in owned):
            _delete(result, path)
    return _with_owners(_merge(result, {**body, "metadata": _managed(body.get("metadata", {}))}), owners)


def update(live: JsonObject, changed: JsonObject, manager: Manager) -> JsonObject:
    """The changed object of an update or patch, which makes the manager the owner of all changed fields."""
    # A writer may change the managed fields themselves.
    owners = _owners(changed if "managedFields" in changed["metadata"] else live)
    before, after = _field_values(live), _field_values(changed)
    written = {path for path, value in after.items() if path not in before or before[path] != value}
    removed = before.keys() - after.keys()
    for owned in owners.values():
        owned.difference_update(written, removed)
    owners[manager] = owners.get(manager, set[Path]()) | written
    return _with_owners(changed, owners)


def _field_values(body: JsonObject) -> dict[Path, Any]:
    """The fields of an object that can have owners, with their values."""
    members = {name: part for name, part in body.items() if name not in {"apiVersion", "kind", "metadata"}}
    if metadata := _managed(body.get("metadata", {})):
        members["metadata"] = metadata
    found: dict[Path, Any] = {}
    _add_leaves(found, (), members)
    found.pop((), None)
    return found


def _managed(metadata: JsonObject) -> JsonObject:
    return {name: part for name, part in metadata.items() if name not in _UNMANAGED}


def _add_leaves(found: dict[Path, Any], prefix: Path, value: Any, name: str = "") -> None:
    """Adds all leaves below a value, and the items of associative lists, which have no value of their own."""
    if is_object(value) and value and name not in _ATOMIC_MAPS:
        for key, part in value.items():
            _add_leaves(found, (*prefix, f"f:{key}"), part, key)
    elif is_array(value) and (items := _items(value, name)):
        for element, item in items.items():
            if element.startswith("k:"):
                found[*prefix, element, _SELF] = None
                _add_leaves(found, (*prefix, element), item)
            else:
                found[*prefix, element] = item
    else:
        found[prefix] = value


def _items(items: list[Any], name: str) -> dict[str, Any]:
    """The items of an associative list or a set by their elements. Empty for an atomic list."""
    if name in _SETS:
        return {f"v:{json.dumps(item)}": item for item in items}
    key = _LIST_KEYS.get(name)
    if key is None or not all(is_object(item) and key in item for item in items):
        return {}
    # Without options, `json.dumps` of a string is several times faster. The values are strings.
    return {f'k:{{"{key}":{json.dumps(item[key])}}}': item for item in items}


def _child(value: Any, element: str, name: str) -> tuple[Any, bool]:
    """The part of a value that an element names, and whether it exists."""
    if element.startswith("f:"):
        members = value if is_object(value) else {}
        return members.get(element[2:]), element[2:] in members
    if element == _SELF:
        return None, True
    items = _items(value, name) if is_array(value) else {}
    return items.get(element), element in items


def _find(value: Any, path: Path) -> tuple[Any, bool]:
    name, exists = "", True
    for element in path:
        value, exists = _child(value, element, name)
        if not exists:
            return None, False
        name = element[2:] if element.startswith("f:") else ""
    return value, exists


def _differs(live: JsonObject, path: Path, value: Any) -> bool:
    """Whether the field exists with another value."""
    found, exists = _find(live, path)
    return exists and found != value


def _covers(path: Path, other: Path) -> bool:
    """Whether removing a path would remove the other one too."""
    prefix = path[:-1] if path[-1] == _SELF else path
    return other[: len(prefix)] == prefix


def _delete(root: JsonObject, path: Path) -> None:
    """Removes a path, and the containers that are empty then."""
    prefix = path[:-1] if path[-1] == _SELF else path
    parents: list[tuple[Any, str, str]] = []
    value, name = root, ""
    for element in prefix:
        parents.append((value, element, name))
        value, exists = _child(value, element, name)
        if not exists:
            return
        name = element[2:] if element.startswith("f:") else ""
    for container, element, list_name in reversed(parents):
        if element.startswith("f:"):
            del container[element[2:]]
        else:
            container[:] = [item for key, item in _items(container, list_name).items() if key != element]
        if container:
            return


def _merge(live: Any, body: Any, name: str = "") -> Any:
    if is_object(live) and is_object(body) and name not in _ATOMIC_MAPS:
        return {**live, **{key: _merge(live.get(key), part, key) for key, part in body.items()}}
    if is_array(live) and is_array(body):
        old, new = _items(live, name), _items(body, name)
        if old and new:
            others = {element: item for element, item in old.items() if element not in new}
            return [*(_merge(old.get(element), item) for element, item in new.items()), *others.values()]
    return deep_copy(body)


def _owners(thing: JsonObject) -> dict[Manager, set[Path]]:
    return {
        Manager(entry.get("manager", ""), entry["operation"], entry.get("subresource", "")): set(
            _decode(entry.get("fieldsV1") or {})
        )
        for entry in thing["metadata"].get("managedFields") or ()
        if entry
    }


def _with_owners(thing: JsonObject, owners: Mapping[Manager, set[Path]]) -> JsonObject:
    entries: list[JsonObject] = []
    for manager, fields in owners.items():
        if fields:
            entry: JsonObject = {
                "manager": manager.name,
                "operation": manager.operation,
                "apiVersion": thing.get("apiVersion", ""),
                "fieldsType": "FieldsV1",
                "fieldsV1": _encode(fields),
            }
            entries.append(entry | ({"subresource": manager.subresource} if manager.subresource else {}))
    return {**thing, "metadata": {**thing["metadata"], "managedFields": entries}}


def _encode(fields: Iterable[Path]) -> JsonObject:
    result: JsonObject = {}
    for path in sorted(fields):
        level = result
        for element in path:
            level = level.setdefault(element, {})
    return result


def _decode(fields: JsonObject) -> Iterable[Path]:
    for element, rest in fields.items():
        if rest:
            yield from ((element, *path) for path in _decode(rest))
        else:
            yield (element,)


def _text(path: Path) -> str:
    """A path as the API server writes it in conflicts."""
    text = ""
    for element in path:
        if element.startswith("f:"):
            text += f".{element[2:]}"
        elif element.startswith("k:"):
            (key, value), *_ = json.loads(element[2:]).items()
            text += f"[{key}={json.dumps(value)}]"
        elif element != _SELF:
            text += f"[={element[2:]}]"
    return text
