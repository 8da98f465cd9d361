"""Which of the free devices a container gets best, when several ids share one physical unit.

`none` takes a different unit for each id as far as there are any; `balanced` takes from the unit with most ids left;
`packed` fills one unit before the next. All of them include what the kubelet insists on, count in natural order
(`card2` before `card10`), prefer units on the NUMA nodes of what is already chosen where the rule leaves a choice,
and give the same answer to the same question.
"""

from collections.abc import Callable, Iterable, Sequence

from accelplane.devices import Device, natural

POLICIES = ("none", "balanced", "packed")


class _Unit:
    """A physical device during one choice: its ids that are left, in natural order, and how many were taken."""

    __slots__ = ("left", "numa", "rank", "taken")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left: list[str] = []
        self.taken = 0
        self.numa: frozenset[int] = frozenset()


def preferred(policy: str, available: Sequence[Device], must_include: Sequence[Device], size: int) -> list[str]:
    """The ids to prefer, `size` of them, those that must be included first.

    `available` contains what must be included, as the kubelet sends it. Raises `ValueError` when it is too short.
    """
    if size > len(available):
        raise ValueError(
            f"AllocationSize ({size}) is greater than the number of available device IDs ({len(available)})"
        )
    chosen = dict.fromkeys(device.id for device in must_include)
    units = _units(available, must_include, chosen)
    near = frozenset[int]().union(*(unit.numa for unit in units if unit.taken))
    rule = _RULES[policy]
    while len(chosen) < size:
        candidates = [unit for unit in units if unit.left]
        if not candidates:
            break
        unit = min(candidates, key=lambda unit: (*rule(unit), not unit.numa & near, unit.rank))
        chosen[unit.left.pop(0)] = None
        unit.taken += 1
        near |= unit.numa
    return list(chosen)


def _units(available: Iterable[Device], must_include: Iterable[Device], chosen: Iterable[str]) -> list[_Unit]:
    taken = set(chosen)
    devices = {device.id: device for device in (*available, *must_include)}
    names = sorted({device.unit for device in devices.values()}, key=natural)
    units = {name: _Unit(rank) for rank, name in enumerate(names)}
    for key in sorted(devices, key=natural):
        device = devices[key]
        unit = units[device.unit]
        if isinstance(device.topology, tuple):
            unit.numa |= frozenset(device.topology)
        if key in taken:
            unit.taken += 1
        else:
            unit.left.append(key)
    return list(units.values())


_RULES: dict[str, Callable[[_Unit], tuple[int, ...]]] = {
    "none": lambda unit: (unit.taken > 0,),
    "balanced": lambda unit: (-len(unit.left),),
    "packed": lambda unit: (unit.taken == 0,),
}
