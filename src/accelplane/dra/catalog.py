"""The devices that a driver publishes for a node, from the offers of the node. Pure functions.

A unit is one device. If it may have several containers, it is one device that may be allocated several times, or, where
the API server does not support this, one device for each share. A GPU with several tiles is also one device for each
tile, where counters prevent the allocation of the GPU and its tiles at the same time.

Only units of the owner "dra" are published. An unhealthy device has a taint, or is left out where the API server does
not support taints. Everything is shortened or replaced to comply with the API's validation.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import Attribute, Version, natural
from accelplane.dra.families.devices import FAMILIES, OTHER, STANDARD, Family, label, with_hash
from accelplane.dra.model import (
    Capacity,
    DeviceHealth,
    DeviceName,
    Effect,
    Features,
    Offer,
    Pool,
    PoolDevice,
    State,
    Taint,
)
from accelplane.dra.validation import (
    MAX_ATTRIBUTES,
    MAX_INTEGER,
    MAX_VALUE,
    MIN_INTEGER,
    is_qualified_name,
    is_semantic_version,
)

Evict = Literal["gone", "sick", "never"]

MAX_MESSAGE = 1024

_MAX_LABEL_VALUE = 63
_NOT_IN_LABEL_VALUE = re.compile(r"[^A-Za-z0-9_.-]+")
_HEALTH: Mapping[State, Literal["HEALTHY", "UNHEALTHY", "UNKNOWN"]] = {
    "healthy": "HEALTHY",
    "degraded": "HEALTHY",
    "unhealthy": "UNHEALTHY",
    "recovering": "UNKNOWN",
    "unbound": "UNHEALTHY",
    "gone": "UNHEALTHY",
    "cleanup": "UNHEALTHY",
}
_COMMON: Mapping[str, Attribute] = {
    "model": "", "type": "", "driver": "", "pciId": "", "pciAddress": "", "health": "", "numaNode": -1, "parent": "",
}  # fmt: skip
_TILES = "tiles"
_MAX_TILES = 16
_SHARES = "shares"
_NUMBER_OF_STANDARD = 3


class _Named(Struct, frozen=True):
    """A unit with the name of its device, and the names of its shares and tiles, each empty if there is only one."""

    name: str
    offer: Offer
    shares: Sequence[str]
    tiles: Sequence[str]


def pool(
    driver: str,
    node: str,
    offers: Mapping[str, Offer],
    features: Features,
    *,
    held: Collection[str],
    evict: Evict,
    other: Family = OTHER,
) -> Pool:
    """What is published of the offers. `held` are the IDs of units with a prepared claim.

    `evict` are the states in which the pods of a device are evicted: `gone`, `sick` (and gone), or `never`. `other` is
    the family of a driver that has none in `FAMILIES`.
    """
    family = FAMILIES.get(driver, other)
    devices: list[PoolDevice] = []
    counter_sets: dict[str, Mapping[str, int]] = {}
    for named in _named(driver, offers):
        offer = named.offer
        taints = _taints(driver, offer, evict)
        if offer.owner != "dra" or not _is_published(offer, features, held=offer.unit.id in held):
            continue
        whole = _device(driver, family, named, taints if features.taints else ())
        if named.tiles and features.counters:
            counter_sets[named.name] = {_TILES: len(named.tiles)}
            devices.append(replace(whole, counters={named.name: {_TILES: len(named.tiles)}}))
            devices.extend(_tile(whole, name, len(named.tiles)) for name in named.tiles)
        elif not named.shares:
            devices.append(whole)
        elif features.consumable:
            devices.append(_shared(whole, offer.shares))
        else:
            devices.extend(_share(whole, name) for name in named.shares)
    if family.own:
        devices = _completed(devices)
    return Pool(driver=driver, name=node, devices=devices, counter_sets=counter_sets)


def device_names(driver: str, offers: Mapping[str, Offer]) -> Mapping[str, DeviceName]:
    """The devices that can be published of the offers, of shares and tiles too, of all owners."""
    found: dict[str, DeviceName] = {}
    for named in _named(driver, offers):
        unit = named.offer.unit.id
        found[named.name] = DeviceName(unit=unit, multiple=bool(named.shares))
        found.update({name: DeviceName(unit=unit, slot=f"s{number}") for number, name in enumerate(named.shares)})
        tiles = enumerate(named.tiles)
        found.update({name: DeviceName(unit=unit, slot=f"t{number}", tile=number) for number, name in tiles})
    return found


def health(driver: str, offers: Mapping[str, Offer]) -> Sequence[DeviceHealth]:
    """The health of all devices that DRA owns."""
    return [
        DeviceHealth(name, _HEALTH[named.offer.state], _message(named.offer))
        for named in _named(driver, offers)
        if named.offer.owner == "dra"
        for name in _names(named)
    ]


def _named(driver: str, offers: Mapping[str, Offer]) -> Iterator[_Named]:
    """The offers with names that are different, without wholes that are offered as virtual functions or parts."""
    family = FAMILIES.get(driver, OTHER)
    parents = {offer.unit.parent for offer in offers.values()}
    found = [(family.name(offer.unit), offer) for offer in offers.values() if offer.unit.id not in parents]
    found.sort(key=lambda each: natural(each[1].unit.id))
    numbers = Counter(name for name, _offer in found)
    taken: set[str] = set()
    for base, offer in found:
        name = base if numbers[base] == 1 else with_hash(base, offer.unit.id)
        count = min(offer.shares, family.max_shares or offer.shares)
        shares = [family.share.format(name=name, number=number) for number in range(count)] if count > 1 else []
        tile_count = offer.unit.attributes.get(_TILES, 1)
        number_of_tiles = tile_count if type(tile_count) is int and 1 < tile_count <= _MAX_TILES and not shares else 0
        named = _Named(name, offer, shares, [f"{name}-t{number}" for number in range(number_of_tiles)])
        # A share or tile can have the name of another unit only if the units have such IDs.
        if taken.isdisjoint(_names(named)):
            taken.update(_names(named))
            yield named


def _names(named: _Named) -> Iterator[str]:
    yield named.name
    yield from named.shares
    yield from named.tiles


def _is_published(offer: Offer, features: Features, *, held: bool) -> bool:
    if offer.state == "gone":
        return held and bool(features.taints)
    return offer.state in ("healthy", "degraded") or bool(features.taints)


def _taints(driver: str, offer: Offer, evict: Evict) -> Sequence[Taint]:
    value = label_value(offer.reason)
    unhealthy: Effect = "NoExecute" if evict == "sick" else "NoSchedule"
    match offer.state:
        case "healthy":
            return ()
        case "degraded":
            return (Taint(f"{driver}/health", value, "None"),)
        case "unhealthy" | "recovering":
            return (Taint(f"{driver}/health", value, unhealthy),)
        case "gone":
            return (Taint(f"{driver}/gone", value, "NoSchedule" if evict == "never" else "NoExecute"),)
        case "unbound" | "cleanup":
            return (Taint(f"{driver}/{offer.state}", value, "NoSchedule"),)


def _device(driver: str, family: Family, named: _Named, taints: Sequence[Taint]) -> PoolDevice:
    unit = named.offer.unit
    defaults = {**_COMMON, **family.attributes}
    own = unit.attributes if family.own else {key: unit.attributes[key] for key in defaults if key in unit.attributes}
    numa_node = unit.attributes.get(f"{STANDARD}numaNode", -1)
    values = {
        **own,
        **family.values(named.offer),
        "health": {"HEALTHY": "Healthy", "UNHEALTHY": "Unhealthy", "UNKNOWN": "Unknown"}[_HEALTH[named.offer.state]],
        "numaNode": numa_node,
        "parent": label(unit.parent) if unit.parent else "",
    }
    attributes = {name: _valid(default, values.get(name, default)) for name, default in defaults.items()}
    for name in ("pciBusID", "pcieRoot"):
        if text := unit.text(f"{STANDARD}{name}"):
            attributes[f"{STANDARD}{name}"] = _text(text)
    if type(numa_node) is int and 0 <= numa_node <= MAX_INTEGER:
        attributes[f"{STANDARD}numaNode"] = numa_node
    capacities = {name: _integer(unit.capacities.get(name, value)) for name, value in family.capacities.items()}
    if family.own:
        for name, value in unit.capacities.items():
            if is_qualified_name(name) and len(attributes) + len(capacities) < MAX_ATTRIBUTES:
                capacities.setdefault(name, _integer(value))
        for name, attribute in values.items():
            if is_qualified_name(name) and len(attributes) + len(capacities) < MAX_ATTRIBUTES:
                attributes.setdefault(name, _valid(attribute, attribute))
    return PoolDevice(
        name=named.name,
        unit=unit.id,
        attributes=attributes,
        capacities={name: Capacity(value) for name, value in capacities.items()},
        taints=taints,
    )


def _tile(whole: PoolDevice, name: str, count: int) -> PoolDevice:
    divided = {
        key: replace(each, value=each.value // count) for key, each in whole.capacities.items() if key != _SHARES
    }
    return replace(
        whole,
        name=name,
        # Classes of complete GPUs select by the type: whole and tiles can never be allocated together.
        attributes={**whole.attributes, "type": "tile", "parent": whole.name, _TILES: 1},
        capacities={**whole.capacities, **divided},
        counters={whole.name: {_TILES: 1}},
    )


def _share(whole: PoolDevice, name: str) -> PoolDevice:
    return replace(whole, name=name, attributes={**whole.attributes, "parent": whole.name})


def _shared(whole: PoolDevice, count: int) -> PoolDevice:
    """The device for `count` containers. A request takes one share, and of other capacities what it names."""
    consumed = {name: replace(each, default=0) for name, each in whole.capacities.items()}
    return replace(whole, capacities={**consumed, _SHARES: Capacity(count, default=1, minimum=1)}, multiple=True)


def _completed(devices: Sequence[PoolDevice]) -> list[PoolDevice]:
    """The devices with the attributes and capacities that others of them have, as long as their number is allowed."""
    attributes: dict[str, Attribute] = {}
    capacities: dict[str, Capacity] = {}
    for device in devices:
        attributes.update({name: _zero(value) for name, value in device.attributes.items() if "/" not in name})
        capacities.update(dict.fromkeys(device.capacities, Capacity(0)))
    if len(attributes) + len(capacities) + _NUMBER_OF_STANDARD > MAX_ATTRIBUTES:
        return list(devices)
    return [
        replace(
            device,
            attributes={**attributes, **device.attributes},
            capacities={
                **{name: replace(each, default=0 if device.multiple else None) for name, each in capacities.items()},
                **device.capacities,
            },
        )
        for device in devices
    ]


def _zero(value: Attribute) -> Attribute:
    return Version("0.0.0") if isinstance(value, Version) else type(value)()


def _valid(default: Attribute, value: Attribute) -> Attribute:
    """The value with the type of the default, in the limits of the API."""
    if isinstance(default, str):
        return _text(value.text if isinstance(value, Version) else str(value))
    if type(value) is not type(default):
        return default
    if isinstance(value, Version):
        return value if is_semantic_version(value.text) else Version("0.0.0")
    return value if isinstance(value, (bool, str)) else _integer(value, MIN_INTEGER)


def _text(text: str) -> str:
    return _cut(text, MAX_VALUE)


def _cut(text: str, size: int) -> str:
    """The longest start of the text in at most `size` bytes. What is not UTF-8 text is replaced."""
    return text.encode(errors="replace")[:size].decode(errors="ignore")


def _integer(value: int, least: int = 0) -> int:
    return max(least, min(MAX_INTEGER, value))


def label_value(text: str) -> str:
    """The value of the taint for a reason."""
    return _NOT_IN_LABEL_VALUE.sub("-", text).strip("-_.")[:_MAX_LABEL_VALUE].rstrip("-_.")


def _message(offer: Offer) -> str:
    return _cut(offer.text or offer.reason, MAX_MESSAGE) if offer.state != "healthy" else ""
