"""Allocation policies: which of the available device IDs a container should get.

A unit is the physical device behind one or several IDs. `in_use` has the number of allocated IDs of each unit.

- `none` takes one ID of each unit before it takes a second one of any. Among these units it takes the one that is
  least in use, so containers that request one device spread evenly, whatever the order of the kubelet's offer.
- `balanced` takes from the unit with most available IDs.
- `packed` takes all IDs of one unit before it takes from the next.

Every policy includes the IDs that the kubelet requires. Ties go to units on the NUMA nodes of the chosen devices, then
to natural order (`card2` before `card10`). Equal requests get equal answers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import Device, natural

POLICIES = ("none", "balanced", "packed")


class _Unit(Struct):
    """A unit during one decision: how many IDs are in use and chosen, and which are available."""

    group: str
    used: int
    chosen: int = 0
    available: list[str] = []
    numa: frozenset[int] = frozenset()


def preferred_ids(
    policy: str,
    available: Sequence[Device],
    must_include: Sequence[Device],
    size: int,
    in_use: Mapping[str, int],
    *,
    group: Callable[[str], str] = str,
) -> list[str]:
    """Returns the `size` IDs that the policy prefers, those of `must_include` first.

    `available` contains `must_include`, as in the kubelet's request. `group` maps a unit to the device that it is a
    part of: `none` spreads over groups where units are equally used. Raises `ValueError` if there are too few IDs.
    """
    if size > len(available):
        raise ValueError(
            f"AllocationSize ({size}) is greater than the number of available device IDs ({len(available)})"
        )
    rule = _RULES[policy]
    chosen = dict.fromkeys(device.id for device in must_include)
    group_use = Counter[str]()
    for name, count in in_use.items():
        group_use[group(name)] += count
    near = frozenset[int]()
    devices = {device.id: device for device in (*available, *must_include)}.values()
    names = sorted({device.unit for device in devices}, key=natural)
    units = {name: _Unit(group(name), in_use.get(name, 0)) for name in names}
    for device in devices:
        unit = units[device.unit]
        if isinstance(device.topology, tuple):
            unit.numa |= frozenset(device.topology)
        if device.id not in chosen:
            unit.available.append(device.id)
            continue
        unit.chosen += 1
        group_use[unit.group] += 1
        near |= unit.numa
    while len(chosen) < size:
        candidates = [unit for unit in units.values() if unit.available]
        if not candidates:
            break
        unit = min(candidates, key=lambda unit: rule(unit, not unit.numa & near, group_use[unit.group]))
        key = min(unit.available, key=natural)
        unit.available.remove(key)
        chosen[key] = None
        unit.chosen += 1
        group_use[unit.group] += 1
        near |= unit.numa
    return list(chosen)


# From a unit, whether it is on none of the chosen NUMA nodes, and the use of its group. The lowest result is preferred.
_RULES: Mapping[str, Callable[[_Unit, bool, int], tuple[int, ...]]] = {
    "none": lambda unit, far, group_use: (unit.chosen > 0, unit.used + unit.chosen, far, group_use),
    "balanced": lambda unit, far, _group_use: (-len(unit.available), far),
    "packed": lambda unit, far, _group_use: (not unit.chosen, far),
}
