"""From a pool to the writes that make the API server's slices the same. Pure functions.

A device stays in its slice while it exists, so that a change of one device is an update of one slice. An update of
exactly one slice keeps the generation of the pool. All other changes make a new generation in all slices: until the
last one is written, readers see an incomplete pool, which they skip, and never a wrong one that is complete.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import Attribute, Version, natural
from accelplane.dra.model import Capacity, Pool, PoolDevice
from accelplane.dra.resourceslice import (
    CounterConsumption,
    CounterSet,
    CounterValue,
    Device,
    DeviceAttribute,
    DeviceCapacity,
    DeviceTaint,
    Metadata,
    OwnerReference,
    RequestPolicy,
    RequestRange,
    ResourcePool,
    ResourceSlice,
    SliceSpec,
    quantity,
)
from accelplane.dra.validation import MAX_CONSUMED_COUNTERS, MAX_COUNTER_SETS, MAX_COUNTERS, MAX_DEVICES, Layout

LABELS = {"app.kubernetes.io/managed-by": "accelplane"}

_MAX_NAME = 253
# The kubelet keeps the health of 16,384 devices of a driver.
_MAX_SLICES = 256


class Target(Struct, frozen=True, kw_only=True):
    """Where slices belong. `owner` is the reference to the node, None to keep the owners of present slices."""

    node: str
    layout: Layout = "separate"
    owner: OwnerReference | None = None


class Plan(Struct, frozen=True):
    """Writes in their order. Updates have the UID and resource version of the present slices."""

    deletes: Sequence[ResourceSlice] = ()
    updates: Sequence[ResourceSlice] = ()
    creates: Sequence[ResourceSlice] = ()

    def __bool__(self) -> bool:
        return bool(self.deletes or self.updates or self.creates)


class _Content(Struct):
    """The content of one slice."""

    devices: list[Device] = []
    counter_sets: list[CounterSet] = []


def plan(
    pool: Pool, present: Mapping[str, ResourceSlice], target: Target, *, generation: int = 0, keep_empty: bool = False
) -> Plan:
    """The writes for a pool. `present` are all slices of the driver on the node, by name.

    `generation` is the highest that was ever seen. With `keep_empty`, a pool without devices has one empty slice.
    """
    ours = {name: each for name, each in present.items() if each.spec.pool.name == pool.name}
    contents = _contents(pool, ours, target, keep_empty=keep_empty)
    deletes = [each for name, each in present.items() if name not in contents]
    found = {name: present[name] for name in contents if name in present}
    generations = {each.spec.pool.generation for each in present.values()}
    current = ResourcePool(name=pool.name, generation=max(generations, default=0), resource_slice_count=len(contents))
    whole = not deletes and len(found) == len(contents) and all(each.spec.pool == current for each in found.values())
    wanted = {
        name: _slice(
            found.get(name, ResourceSlice(metadata=Metadata(name=name))), content, pool.driver, current, target
        )
        for name, content in contents.items()
    }
    differing = [name for name, each in found.items() if not _same_spec(each.spec, wanted[name].spec)]
    if not whole or len(differing) > 1:
        highest = max(generation, current.generation)
        new = replace(current, generation=highest + 1)
        wanted = {name: replace(each, spec=replace(each.spec, pool=new)) for name, each in wanted.items()}
        updates = list(found)
    else:
        updates = [name for name, each in found.items() if name in differing or each.metadata != wanted[name].metadata]
    return Plan(
        deletes=deletes,
        updates=[wanted[name] for name in updates],
        creates=[each for name, each in wanted.items() if name not in found],
    )


def slice_name(node: str, driver: str, suffix: str) -> str:
    """The name of a slice, the same after a restart: a create whose response was lost does not make a second one."""
    name = f"{node}-{driver}-{suffix}"
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9].rstrip('.-')}-{digest}"


def _contents(
    pool: Pool, present: Mapping[str, ResourceSlice], target: Target, *, keep_empty: bool
) -> dict[str, _Content]:
    """The content of each slice, by name."""
    groups = _groups(pool, target.layout)
    numbers = {slice_name(target.node, pool.driver, str(number)): number for number in range(_MAX_SLICES)}
    homes = {
        device.name: numbers[name]
        for name, each in present.items()
        if name in numbers
        for device in each.spec.devices or ()
    }
    placed = _place(groups, homes)
    if not placed and keep_empty:
        placed[min((numbers[name] for name in present if name in numbers), default=0)] = []
    together = target.layout == "together"
    contents = {
        slice_name(target.node, pool.driver, str(number)): _Content(
            [_device(device, target.layout) for group in members for device in group.devices],
            [_counter_set(name, group.sets[name]) for group in members for name in group.sets] if together else [],
        )
        for number, members in sorted(placed.items())
    }
    sets = [] if together else [_counter_set(name, pool.counter_sets[name]) for name in sorted(pool.counter_sets)]
    for number, start in enumerate(range(0, len(sets), MAX_COUNTER_SETS)):
        name = slice_name(target.node, pool.driver, f"c{number}")
        contents[name] = _Content(counter_sets=sets[start : start + MAX_COUNTER_SETS])
    return contents


class _Group(Struct):
    """Devices that must be in one slice, with the counter sets that must be there too."""

    devices: list[PoolDevice]
    sets: Mapping[str, Mapping[str, int]] = {}


def _groups(pool: Pool, layout: Layout) -> list[_Group]:
    if layout == "separate":
        return [_Group([device]) for device in pool.devices]
    groups: dict[tuple[str, ...], _Group] = {}
    for device in pool.devices:
        key = tuple(sorted(device.counters)) or (device.name, "")
        group = groups.setdefault(key, _Group([], {name: pool.counter_sets[name] for name in device.counters}))
        group.devices.append(device)
    return list(groups.values())


def _place(groups: Sequence[_Group], homes: Mapping[str, int]) -> dict[int, list[_Group]]:
    """The groups by the number of their slice: that where their devices are, or the first one with room."""
    placed: dict[int, list[_Group]] = {}
    new: list[_Group] = []
    for group in groups:
        home = next((homes[device.name] for device in group.devices if device.name in homes), None)
        if home is not None and _has_room(placed.get(home, ()), group):
            placed.setdefault(home, []).append(group)
        else:
            new.append(group)
    for group in new:
        number = 0
        while not _has_room(placed.get(number, ()), group):
            number += 1
        placed.setdefault(number, []).append(group)
    return placed


def _has_room(members: Sequence[_Group], group: _Group) -> bool:
    if not members:
        return True
    groups = (*members, group)
    consumed = sum(len(names) for each in groups for device in each.devices for names in device.counters.values())
    return (
        sum(len(each.devices) for each in groups) <= MAX_DEVICES
        and sum(len(names) for each in groups for names in each.sets.values()) <= MAX_COUNTERS
        and consumed <= MAX_CONSUMED_COUNTERS
    )


def _slice(found: ResourceSlice, content: _Content, driver: str, pool: ResourcePool, target: Target) -> ResourceSlice:
    """The slice with this content. The times of its present taints stay."""
    times = {
        (device.name, replace(taint, time_added=None)): taint.time_added
        for device in found.spec.devices or ()
        for taint in device.taints or ()
    }
    devices = [
        replace(
            device,
            taints=[replace(taint, time_added=times.get((device.name, taint))) for taint in device.taints],
        )
        if device.taints
        else device
        for device in sorted(content.devices, key=lambda each: natural(each.name))
    ]
    return ResourceSlice(
        metadata=_metadata(found.metadata, target.owner),
        spec=SliceSpec(
            driver=driver,
            node_name=target.node,
            pool=pool,
            devices=devices or None,
            shared_counters=content.counter_sets or None,
        ),
    )


def _metadata(present: Metadata, owner: OwnerReference | None) -> Metadata:
    """The metadata with our labels and our owner. Other owners are kept, unless they are a node or a controller."""
    labels = {**(present.labels or {}), **LABELS}
    if owner is None:
        return replace(present, labels=labels)
    others = [each for each in present.owner_references or () if each.kind != "Node" and not each.controller]
    return replace(present, labels=labels, owner_references=[*others, owner])


def _same_spec(found: SliceSpec, wanted: SliceSpec) -> bool:
    """Whether they have the same content, in any order and with any pool."""
    return _comparable(found) == _comparable(wanted)


def _comparable(spec: SliceSpec) -> tuple[object, ...]:
    return (
        spec.driver,
        spec.node_name,
        {device.name: list(_device_content(device)) for device in spec.devices or ()},
        len(spec.devices or ()),
        {each.name: each.counters for each in spec.shared_counters or ()},
        len(spec.shared_counters or ()),
    )


def _device_content(device: Device) -> Iterator[object]:
    yield dict(device.attributes or {})
    yield dict(device.capacity or {})
    yield {each.counter_set: each.counters for each in device.consumes_counters or ()}
    yield sorted((taint.key, taint.value, taint.effect) for taint in device.taints or ())
    yield bool(device.allow_multiple_allocations)


def _device(device: PoolDevice, layout: Layout) -> Device:
    taints = [DeviceTaint(key=each.key, value=each.value, effect=each.effect) for each in device.taints]
    if layout == "together":
        taints = [taint for taint in taints if taint.effect != "None"]
    consumed = [CounterConsumption(name, _counters(counters)) for name, counters in sorted(device.counters.items())]
    return Device(
        name=device.name,
        attributes={name: _attribute(value) for name, value in sorted(device.attributes.items())} or None,
        capacity={name: _capacity(value) for name, value in sorted(device.capacities.items())} or None,
        consumes_counters=consumed or None,
        taints=taints or None,
        allow_multiple_allocations=True if device.multiple else None,
    )


def _attribute(value: Attribute) -> DeviceAttribute:
    match value:
        case bool():
            return DeviceAttribute(boolean=value)
        case int():
            return DeviceAttribute(integer=value)
        case str():
            return DeviceAttribute(string=value)
        case Version():
            return DeviceAttribute(version=value.text)


def _capacity(capacity: Capacity) -> DeviceCapacity:
    if capacity.default is None:
        return DeviceCapacity(quantity(capacity.value))
    limits = None if capacity.minimum is None else RequestRange(minimum=quantity(capacity.minimum))
    return DeviceCapacity(
        quantity(capacity.value), RequestPolicy(default=quantity(capacity.default), valid_range=limits)
    )


def _counter_set(name: str, counters: Mapping[str, int]) -> CounterSet:
    return CounterSet(name, _counters(counters))


def _counters(counters: Mapping[str, int]) -> Mapping[str, CounterValue]:
    return {name: CounterValue(quantity(value)) for name, value in sorted(counters.items())}
