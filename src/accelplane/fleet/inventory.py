"""Answers of agents: the inventory (`/api/v1/inventory`) and the current values (`/api/v1/readings`) of a node.

An agent may be of another version, or not an agent at all. Everything is decoded by type and within limits; an answer
that does not fit is rejected completely.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from accelplane.kube.interning import StringPool

from .model import Change, DeviceReadings, Holder, Phase, Resource, Skipped, Unit, Value

MAX_BYTES = 2 * 1024 * 1024
VERSION = 1

_MAX_PROBLEM = 300
_MAX_UNITS = 8192
_MAX_HOLDERS = 16_384
_SHARED_IDS = 4

T = TypeVar("T")

_Name = Annotated[str, Meta(max_length=253)]
_Text = Annotated[str, Meta(max_length=2048)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
_Ids = Annotated[dict[_Name, _Count], Meta(max_length=256)]
_Generation = Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:-]{1,64}\Z")]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class InventoryError(Exception):
    """An answer that is not an inventory or not readings."""


class Inventory(Struct, frozen=True, gc=False):
    """The inventory that one agent reports about its node."""

    node: str
    agent: str
    version: str
    generation: str
    plugins: tuple[str, ...]
    resources: tuple[Resource, ...]
    units: tuple[Unit, ...]
    skipped: tuple[Skipped, ...]
    holders_source: str = ""
    holders_age: float = 0.0


class _Holder(Struct, frozen=True):
    namespace: _Name
    pod: _Name
    container: _Name
    resource: _Name
    count: _Count
    since: _Time = 0.0
    via: _Name = ""


class _Change(Struct, frozen=True):
    time: _Time
    phase: Phase
    reason: _Name = ""
    text: _Text = ""


class _Unit(Struct, frozen=True):
    unit: _Name
    phase: Phase
    known: bool
    ids: _Ids
    holders: Annotated[list[_Holder], Meta(max_length=4096)]
    history: Annotated[list[_Change], Meta(max_length=32)]
    device: _Name = ""
    bdf: _Name = ""
    model: _Name = ""
    numa: Annotated[int, Meta(ge=-1, le=65_536)] | None = None
    reason: _Name = ""
    text: _Text = ""
    since: _Time = 0.0
    idle_since: _Time = 0.0


class _Resource(Struct, frozen=True):
    name: _Name
    stage: _Name
    ids: _Count
    healthy: _Count
    allocated: _Count
    problem: _Text = ""


class _Skipped(Struct, frozen=True):
    subject: _Name
    reason: _Text


class _Plugin(Struct, frozen=True):
    name: _Name
    resources: Annotated[list[_Resource], Meta(max_length=256)]
    units: Annotated[list[_Unit], Meta(max_length=_MAX_UNITS)]
    skipped: Annotated[list[_Skipped], Meta(max_length=1024)]


class _Source(Struct, frozen=True):
    source: _Name = ""
    age: _Time | None = None


class _Inventory(Struct, frozen=True):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    node: _Name
    agent: _Name
    generation: _Generation
    plugins: Annotated[list[_Plugin], Meta(max_length=64)]
    versions: Annotated[dict[_Name, _Name], Meta(max_length=64)] = {}
    holders: _Source = _Source()


class _Value(Struct, frozen=True):
    name: _Name
    value: float
    labels: Annotated[dict[_Name, _Name], Meta(max_length=16)] = {}


class _Device(Struct, frozen=True):
    device: _Name
    values: Annotated[list[_Value], Meta(max_length=512)]
    bdf: _Name = ""
    awake: bool = True
    stuck: bool = False
    outcomes: Annotated[dict[_Name, _Count], Meta(max_length=32)] = {}


class _PluginReadings(Struct, frozen=True):
    name: _Name
    devices: Annotated[list[_Device], Meta(max_length=4096)]


class _Readings(Struct, frozen=True):
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    time: _Time
    plugins: Annotated[list[_PluginReadings], Meta(max_length=64)]


class _Version(Struct, frozen=True):
    version: object = None


_INVENTORY = msgspec.json.Decoder(_Inventory)
_READINGS = msgspec.json.Decoder(_Readings)
_shared = StringPool(50_000)


def decode_inventory(body: bytes) -> Inventory:
    """The inventory in an answer. Raises `InventoryError`."""
    found = _decode(body, _INVENTORY, "inventory")
    if sum(len(plugin.units) for plugin in found.plugins) > _MAX_UNITS:
        raise InventoryError(f"inventory: found more than {_MAX_UNITS} units")
    if sum(len(unit.holders) for plugin in found.plugins for unit in plugin.units) > _MAX_HOLDERS:
        raise InventoryError(f"inventory: found more than {_MAX_HOLDERS} holders")
    return Inventory(
        node=found.node,
        agent=_clean(found.agent),
        version=_clean(found.versions.get("accelplane", "")),
        generation=found.generation,
        plugins=tuple(_clean(plugin.name) for plugin in found.plugins),
        resources=tuple(_resource(each) for plugin in found.plugins for each in plugin.resources),
        units=tuple(_unit(_clean(plugin.name), each) for plugin in found.plugins for each in plugin.units),
        skipped=tuple(
            Skipped(_clean(plugin.name), _clean(each.subject), _clean(each.reason))
            for plugin in found.plugins
            for each in plugin.skipped
        ),
        holders_source=_clean(found.holders.source),
        holders_age=found.holders.age or 0.0,
    )


def decode_readings(body: bytes) -> tuple[float, tuple[DeviceReadings, ...]]:
    """The time and the devices in an answer. Raises `InventoryError`."""
    found = _decode(body, _READINGS, "readings")
    return found.time, tuple(
        DeviceReadings(
            plugin=_clean(plugin.name),
            device=_clean(each.device),
            bdf=_clean(each.bdf),
            awake=each.awake,
            stuck=each.stuck,
            values=tuple(Value(_clean(value.name), _labels(value.labels), value.value) for value in each.values),
            outcomes={_clean(name): count for name, count in each.outcomes.items()},
        )
        for plugin in found.plugins
        for each in plugin.devices
    )


def _decode(body: bytes, decoder: msgspec.json.Decoder[T], description: str) -> T:
    """Raises `InventoryError`."""
    if len(body) > MAX_BYTES:
        raise InventoryError(f"{description}: found more than {MAX_BYTES} bytes")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        version = _version(body)
        if version is not None and version != VERSION:
            raise InventoryError(
                f"{description}: found version {str(version)[:20]!a}, expected {VERSION}; "
                "run the same version of accelplane on nodes and here"
            ) from None
        raise InventoryError(f"{description}: {str(error)[:_MAX_PROBLEM]}") from None


def _version(body: bytes) -> object:
    try:
        return msgspec.json.decode(body, type=_Version).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _resource(each: _Resource) -> Resource:
    return Resource(
        name=_clean(each.name),
        ids=each.ids,
        healthy=each.healthy,
        allocated=each.allocated,
        stage=_clean(each.stage),
        problem=_clean(each.problem),
    )


def _unit(plugin: str, each: _Unit) -> Unit:
    return Unit(
        plugin=plugin,
        unit=_clean(each.unit),
        device=_clean(each.device),
        bdf=_clean(each.bdf),
        model=_clean(each.model),
        numa=each.numa,
        phase=each.phase,
        known=each.known,
        reason=_clean(each.reason),
        text=_clean(each.text),
        since=each.since,
        idle_since=each.idle_since,
        ids=_ids(each.ids),
        holders=tuple(_holder(holder) for holder in each.holders),
        history=_history(each.history),
    )


def _holder(each: _Holder) -> Holder:
    return Holder(
        _clean(each.namespace),
        _clean(each.pod),
        _clean(each.container),
        _clean(each.resource),
        each.count,
        each.since,
        _clean(each.via),
    )


def _history(changes: Sequence[_Change]) -> tuple[Change, ...]:
    return tuple(Change(each.time, each.phase, _clean(each.reason), _clean(each.text)) for each in changes)


def _ids(found: Mapping[str, int]) -> Mapping[str, int]:
    clean = tuple((_clean(name), count) for name, count in found.items())
    # Most units of a cluster have the same few resources.
    return _shared_ids(clean) if len(clean) <= _SHARED_IDS else dict(clean)


@lru_cache(maxsize=4096)
def _shared_ids(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return dict(items)


def _labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {_clean(name): _clean(value) for name, value in labels.items()}


def _clean(text: str) -> str:
    """The text without characters that control a terminal or the direction of writing; shared with equal texts."""
    if not text.isprintable():
        text = _CONTROL.sub("?", text)
    return _shared(text)
