"""The topology manager: chooses the NUMA nodes of a container from those of the available devices.

Each resource has hints: sets of NUMA nodes that can satisfy its request; the smallest possible sets are preferred. A
policy merges one hint of each resource into the best common set and decides whether the container is admitted. Sets of
nodes are bit masks. Facts: the Kubernetes documentation on topology management policies (container scope, default
options), whose machine may have 8 NUMA nodes at most.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from accelplane.kubelet.embedded.model import DeviceStatus

Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MAX_NUMA_NODES = 8


class Hint(NamedTuple):
    """A set of NUMA nodes that can satisfy a request; `affinity` None means any."""

    affinity: int | None
    preferred: bool


ANYWHERE = Hint(None, preferred=True)
NOWHERE = Hint(None, preferred=False)


def checked_policy(name: str) -> Policy:
    """The policy of that name. Raises `ValueError`."""
    for policy in POLICIES:
        if policy == name:
            return policy
    raise ValueError(f"topology policy {name!r}, expected one of {', '.join(POLICIES)}")


def node_mask(device: DeviceStatus, numa_nodes: int) -> int:
    """The device's NUMA nodes as bits, without those that the machine does not have."""
    mask = 0
    for node in device.nodes:
        if 0 <= node < numa_nodes:
            mask |= 1 << node
    return mask


def has_topology(devices: Mapping[str, DeviceStatus]) -> bool:
    """Whether any device of a resource has a NUMA node; a resource without one has no hints."""
    return any(device.nodes for device in devices.values())


def resource_hints(
    devices: Mapping[str, DeviceStatus],
    size: int,
    *,
    available: Collection[str],
    reusable: Collection[str],
    numa_nodes: int,
) -> list[Hint]:
    """All sets of nodes with `size` devices. Empty if there is none.

    A device of several nodes is on each of them. Reusable devices have to be used, so the set must include them.
    """
    everything = Counter(node_mask(device, numa_nodes) for device in devices.values())
    free = Counter(_masks(devices, available, numa_nodes))
    given = Counter(_masks(devices, reusable, numa_nodes))
    narrowest = numa_nodes
    masks: list[int] = []
    for mask in range(1, 1 << numa_nodes):
        if _within(mask, everything) >= size:
            narrowest = min(narrowest, mask.bit_count())
        if any(not mask & each for each in given):
            continue
        if _within(mask, given) + _within(mask, free) >= size:
            masks.append(mask)
    return [Hint(mask, mask.bit_count() == narrowest) for mask in masks]


def decide(policy: Policy, hints: Sequence[Sequence[Hint] | None], numa_nodes: int) -> tuple[int | None, bool]:
    """The nodes for a container's devices (None: any), and whether it is admitted.

    `hints` are those of each resource that the container requests, None for a resource without NUMA nodes.
    """
    if policy == "none":
        return None, True
    everywhere = (1 << numa_nodes) - 1
    merged = [[ANYWHERE] if each is None else list(each) or [NOWHERE] for each in hints]
    if policy == "single-numa-node":
        merged = [[hint for hint in each if _on_one_node(hint)] for each in merged]
    affinity, preferred = _best_intersection(merged, everywhere)
    if policy == "best-effort":
        return affinity, True
    if policy == "single-numa-node" and affinity == everywhere:
        return None, preferred
    return affinity, preferred


def _masks(devices: Mapping[str, DeviceStatus], ids: Collection[str], numa_nodes: int) -> list[int]:
    return [node_mask(devices[key], numa_nodes) for key in ids if key in devices and devices[key].nodes]


def _within(mask: int, counted: Mapping[int, int]) -> int:
    return sum(count for each, count in counted.items() if mask & each)


def _on_one_node(hint: Hint) -> bool:
    return hint.preferred and (hint.affinity is None or hint.affinity.bit_count() == 1)


def _best_intersection(hints: Sequence[Sequence[Hint]], everywhere: int) -> tuple[int, bool]:
    """The best intersection of one hint of each resource.

    An intersection is preferred if all its hints are preferred and have the same nodes. For each resource only the
    distinct intersections are kept; the number of combinations of hints is exponential.
    """
    # Intersection so far, the common nodes of the preferred hints (None: no hint had nodes yet), still preferred.
    merged: set[tuple[int, int | None, bool]] = {(everywhere, None, True)}
    for each in hints:
        merged = {_merge(state, hint) for state in merged for hint in each}
    best_width = max((_narrowest(each) for each in hints), default=0)
    candidates = [(mask, preferred) for mask, _, preferred in merged if mask]
    return min(candidates, key=lambda one: _rank(*one, best_width), default=(everywhere, False))


def _merge(state: tuple[int, int | None, bool], hint: Hint) -> tuple[int, int | None, bool]:
    mask, named, preferred = state
    if hint.affinity is None:
        return (mask, named, True) if preferred and hint.preferred else (mask, None, False)
    if preferred and hint.preferred and named in (None, hint.affinity):
        return mask & hint.affinity, hint.affinity, True
    return mask & hint.affinity, None, False


def _narrowest(hints: Sequence[Hint]) -> int:
    return min((hint.affinity.bit_count() for hint in hints if hint.affinity is not None), default=0)


def _rank(mask: int, preferred: bool, best_width: int) -> tuple[int, int, int, int]:
    """The lowest is best: preferred and small; if not preferred, not smaller than the largest best hint."""
    width = mask.bit_count()
    if preferred:
        return 0, 0, width, mask
    if width > best_width:
        return 1, 1, width, mask
    return 1, 0, best_width - width, mask
