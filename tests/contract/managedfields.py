"""Who owns which fields of an object, as the API server keeps it in `metadata.managedFields`.

Server-side apply removes fields that a manager applied earlier and does not apply any more, unless another entry owns
them.
Updates of others do not take fields away here, and no apply is a conflict.
"""

import json
from typing import Any

Object = dict[str, Any]

# The keys of associative lists; other lists are atomic.
KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
_UNMANAGED = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")


def entries(thing: Object) -> list[Object]:
    return thing["metadata"].get("managedFields") or []


def with_entry(thing: Object, body: Object, manager: str, operation: str, subresource: str) -> list[Object]:
    """The managed fields of a thing after a manager has written a body."""
    made: Object = {"manager": manager, "operation": operation, "fieldsV1": fields_of(body)}
    if subresource:
        made["subresource"] = subresource
    known = entries(thing)
    position = next((index for index, each in enumerate(known) if _same(each, made)), len(known))
    return [*known[:position], made, *known[position + 1 :]]


def removable(thing: Object, manager: str, subresource: str) -> Object:
    """The part of a thing that only this manager has applied."""
    probe = {"manager": manager, "operation": "Apply", **({"subresource": subresource} if subresource else {})}
    mine: Object = next((each["fieldsV1"] for each in entries(thing) if _same(each, probe)), {})
    for each in entries(thing):
        if not _same(each, probe):
            mine = _minus(mine, each.get("fieldsV1") or {})
    return _part(thing, mine) if mine else {}


def fields_of(body: Object) -> Object:
    """The fields of a body in the fieldsV1 format."""
    metadata = {name: value for name, value in body.get("metadata", {}).items() if name not in _UNMANAGED}
    rest = {name: value for name, value in body.items() if name not in ("apiVersion", "kind", "metadata")}
    return _fields({**rest, **({"metadata": metadata} if metadata else {})})


def _same(one: Object, other: Object) -> bool:
    return all(one.get(key) == other.get(key) for key in ("manager", "operation", "subresource"))


def _fields(value: Any, key: str = "") -> Object:
    if isinstance(value, dict):
        return {f"f:{name}": _fields(part, name) for name, part in value.items()}
    if isinstance(value, list) and key in KEYS:
        by = KEYS[key]
        return {f"k:{json.dumps({by: each[by]}, separators=(',', ':'))}": {".": {}, **_fields(each)} for each in value}
    return {}


def _minus(fields: Object, other: Object) -> Object:
    result: Object = {}
    for name, part in fields.items():
        if name not in other:
            result[name] = part
        elif part and other[name] and (left := _minus(part, other[name])):
            result[name] = left
    return result


def _part(value: Any, fields: Object) -> Any:
    if not fields:
        return value
    if isinstance(value, dict):
        return {name: _part(part, fields[f"f:{name}"]) for name, part in value.items() if f"f:{name}" in fields}
    if isinstance(value, list):
        owned = [(json.loads(name[2:]), part) for name, part in fields.items() if name.startswith("k:")]
        return [_part(each, part) for each in value for keys, part in owned if keys.items() <= each.items()]
    return value
