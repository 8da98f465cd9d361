"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386), as the API server applies them."""

from collections.abc import Mapping, Sequence
from typing import Any

from .documents import JsonObject, deep_copy, is_array, is_object


class PatchError(Exception):
    """The patch does not fit the document."""


def apply_json_patch(document: Any, patch: Sequence[Mapping[str, Any]]) -> Any:
    """A copy of the document with the patch applied. Raises `PatchError`."""
    root = {"": deep_copy(document)}
    for step in patch:
        try:
            _apply_step(root, step)
        except (LookupError, TypeError, ValueError) as error:
            raise PatchError(f"{step}: {type(error).__name__}: {error}") from error
    return root[""]


def apply_merge_patch(document: Any, change: Any) -> Any:
    """A copy of the document with the patch applied."""
    if not is_object(change):
        return deep_copy(change)
    result: JsonObject = deep_copy(document) if is_object(document) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result


def _apply_step(root: dict[str, Any], step: Mapping[str, Any]) -> None:
    match step["op"]:
        case "add":
            _add(root, step["path"], deep_copy(step["value"]))
        case "remove":
            _remove(root, step["path"])
        case "replace":
            parent, key = _locate(root, step["path"])
            _ = parent[key]
            parent[key] = deep_copy(step["value"])
        case "test":
            parent, key = _locate(root, step["path"])
            if parent[key] != step["value"]:
                raise ValueError(f"found {parent[key]!r}")
        case "copy":
            parent, key = _locate(root, step["from"])
            _add(root, step["path"], deep_copy(parent[key]))
        case "move":
            _add(root, step["path"], _remove(root, step["from"]))
        case other:
            raise ValueError(f"unknown operation {other!r}")


def _locate(root: dict[str, Any], pointer: str) -> tuple[Any, str | int]:
    """The container that a pointer leads to, and the key or index in it."""
    parent: Any = root
    # The document is the member "" of the root.
    *path, last = [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")]
    for name in path:
        parent = parent[_key(parent, name)]
    return parent, _key(parent, last)


def _key(parent: Any, name: str) -> str | int:
    if is_array(parent):
        index = len(parent) if name == "-" else int(name)
        if not 0 <= index <= len(parent):
            raise IndexError(f"index {name} of {len(parent)} items")
        return index
    if not is_object(parent):
        raise TypeError(f"{name!r} in a {type(parent).__name__}")
    return name


def _add(root: dict[str, Any], pointer: str, value: Any) -> None:
    parent, key = _locate(root, pointer)
    if is_array(parent) and isinstance(key, int):
        parent.insert(key, value)
    elif is_object(parent) and isinstance(key, str):
        parent[key] = value


def _remove(root: dict[str, Any], pointer: str) -> Any:
    parent, key = _locate(root, pointer)
    return parent.pop(key)
