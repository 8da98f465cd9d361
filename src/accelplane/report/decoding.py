"""Decodes the documents of agents.

An agent may be of another version, or not an agent at all. Everything is decoded by type and within limits; a document
that does not fit is rejected completely. Characters that control a terminal or the direction of writing are replaced.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from accelplane.report.inventory import NodeInventory
from accelplane.report.limits import MAX_BYTES, MAX_HOLDERS, MAX_UNITS, VERSION
from accelplane.report.readings import CurrentValues

_MAX_PROBLEM = 300
_SHARED_ITEMS = 4

T = TypeVar("T", bound=Struct)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class ReportError(Exception):
    """A document that is not an inventory or not readings."""


class _Version(Struct, frozen=True):
    version: object = None


_INVENTORY = msgspec.json.Decoder(NodeInventory)
_READINGS = msgspec.json.Decoder(CurrentValues)


def decode_inventory(body: bytes, share: Callable[[str], str] = str) -> NodeInventory:
    """The inventory in an answer. `share` returns one object for equal texts. Raises `ReportError`."""
    found = _decode(body, _INVENTORY, "inventory")
    if sum(len(plugin.units) for plugin in found.plugins) > MAX_UNITS:
        raise ReportError(f"inventory: found more than {MAX_UNITS} units")
    if sum(len(unit.holders) for unit in found.units) > MAX_HOLDERS:
        raise ReportError(f"inventory: found more than {MAX_HOLDERS} holders")
    for plugin in found.plugins:
        for each in (*plugin.units, *plugin.skipped):
            force_setattr(each, "plugin", plugin.name)
    _clean(found, share)
    return found


def decode_readings(body: bytes, share: Callable[[str], str] = str) -> CurrentValues:
    """The readings in an answer. Raises `ReportError`."""
    found = _decode(body, _READINGS, "readings")
    for plugin in found.plugins:
        for each in plugin.devices:
            force_setattr(each, "plugin", plugin.name)
    # Without escapes there are no control characters: readings of all nodes are decoded once a minute.
    if not body.isascii() or b"\\" in body or b"\x7f" in body:
        _clean(found, share)
    return found


def _decode(body: bytes, decoder: msgspec.json.Decoder[T], description: str) -> T:
    """Raises `ReportError`."""
    if len(body) > MAX_BYTES:
        raise ReportError(f"{description}: found more than {MAX_BYTES} bytes")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        version = _version(body)
        if version is not None and version != VERSION:
            raise ReportError(
                f"{description}: found version {str(version)[:20]!a}, expected {VERSION}; "
                "run the same version of accelplane on nodes and here"
            ) from None
        raise ReportError(f"{description}: {str(error)[:_MAX_PROBLEM]}") from None


def _version(body: bytes) -> object:
    try:
        return msgspec.json.decode(body, type=_Version).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _clean(value: Struct, share: Callable[[str], str]) -> None:
    """Replaces the texts of a value that was just decoded, and of all its parts, so that no copy of it is needed."""
    for name in value.__struct_fields__:
        part: object = getattr(value, name)
        if isinstance(part, str):
            force_setattr(value, name, _text(part, share))
        elif isinstance(part, Struct):
            _clean(part, share)
        elif isinstance(part, tuple) and part and isinstance(part[0], str):
            texts: tuple[str, ...] = part  # pyright: ignore[reportUnknownVariableType] - all elements have one type
            force_setattr(value, name, tuple(_text(text, share) for text in texts))
        elif isinstance(part, tuple):
            for each in part:  # pyright: ignore[reportUnknownVariableType] - all elements are values
                _clean(each, share)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(part, dict):
            force_setattr(value, name, _mapping(part, share))  # pyright: ignore[reportUnknownArgumentType]


def _mapping(found: dict[str, object], share: Callable[[str], str]) -> dict[str, object]:
    items = tuple(
        (_text(name, share), _text(item, share) if isinstance(item, str) else item) for name, item in found.items()
    )
    # Most units of a cluster have the same few resources.
    return _shared_mapping(items) if len(items) <= _SHARED_ITEMS else dict(items)


@lru_cache(maxsize=4096, typed=True)
def _shared_mapping(items: tuple[tuple[str, object], ...]) -> dict[str, object]:
    return dict(items)


def _text(text: str, share: Callable[[str], str]) -> str:
    return share(text if text.isprintable() else _CONTROL.sub("?", text))
