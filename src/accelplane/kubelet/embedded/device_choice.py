"""Chooses devices for a container, in two steps before and after GetPreferredAllocation.

Devices of the pod's finished init containers come first, then free ones on the NUMA nodes that the topology manager
chose. `plan` returns the fixed IDs and those that the plugin may choose from; `complete` adds the plugin's choice.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct

from accelplane.kubelet.embedded.model import DeviceStatus
from accelplane.kubelet.embedded.topology import has_topology

Shuffled = Callable[[Iterable[str]], list[str]]


class NotEnough(Exception):
    """Fewer devices are free than requested. The text is part of the kubelet's."""


class Plan(Struct, frozen=True):
    """An unfinished choice of `size` devices: all of `selected`, the rest from `choice`, by default in the order of
    `fallback`."""

    size: int
    selected: tuple[str, ...]
    choice: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return len(self.selected) >= self.size


def plan(
    devices: Mapping[str, DeviceStatus],
    size: int,
    *,
    reusable: Collection[str],
    in_use: Collection[str],
    affinity: int | None,
    shuffled: Shuffled,
) -> Plan:
    """The part of the choice that needs no plugin. Raises `NotEnough`.

    `shuffled` returns IDs in the order in which they are taken where no other order applies.
    """
    selected = shuffled(reusable)[:size]
    needed = size - len(selected)
    if not needed:
        return Plan(size, tuple(selected))
    available = [key for key, device in devices.items() if device.healthy and key not in in_use]
    if len(available) < needed:
        raise NotEnough(f"Requested: {needed}, Available: {len(available)}")
    aligned, unaligned, unplaced = _by_affinity(devices, available, affinity)
    if needed < len(aligned):
        return Plan(size, tuple(selected), tuple(shuffled(aligned)), tuple(shuffled(aligned)))
    selected += shuffled(aligned)
    if len(selected) >= size:
        return Plan(size, tuple(selected))
    return Plan(
        size,
        tuple(selected),
        tuple(key for key in shuffled(available) if key not in selected),
        (*shuffled(unaligned), *shuffled(unplaced)),
    )


def complete(unfinished: Plan, preferred: Iterable[str]) -> tuple[str, ...]:
    """The final choice. Preferred IDs that were not offered are ignored; missing ones come from the fallback."""
    offered = frozenset(unfinished.choice)
    chosen = dict.fromkeys(unfinished.selected)
    for key in (*(key for key in preferred if key in offered), *unfinished.fallback):
        if len(chosen) >= unfinished.size:
            break
        chosen[key] = None
    return tuple(chosen)


def _by_affinity(
    devices: Mapping[str, DeviceStatus], available: Iterable[str], affinity: int | None
) -> tuple[list[str], list[str], list[str]]:
    """Devices on the nodes of the affinity, on other nodes, and without a node."""
    if affinity is None or not has_topology(devices):
        return [], [], list(available)
    aligned: list[str] = []
    unaligned: list[str] = []
    unplaced: list[str] = []
    affinity_nodes = {node for node in range(affinity.bit_length()) if affinity >> node & 1}
    for key in available:
        nodes = devices[key].nodes
        group = unplaced if not nodes else unaligned if affinity_nodes.isdisjoint(nodes) else aligned
        group.append(key)
    return aligned, unaligned, unplaced
