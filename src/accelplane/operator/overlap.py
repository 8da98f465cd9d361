"""Nodes on which two custom resources of a kind meet: both plugins would register the same resources with the kubelet.

    overlaps(plugins, nodes)                 every pair of resources that share nodes
    overlaps_of(plugin, others, nodes)       those of one resource, which may be about to change
    told(overlap, name)                      the same in a sentence to the author of one of the two

Only node selectors are compared: whether taints keep one of the pods away may change at any time.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import msgspec

from accelplane.operator.models import DevicePlugin, effective_selector

_NAMED = 3


class Overlap(msgspec.Struct, frozen=True):
    """Two resources of a kind by name, and the nodes that both select, sorted."""

    kind: str
    first: str
    second: str
    nodes: tuple[str, ...]

    def other(self, name: str) -> str:
        """The resource that the named one shares the nodes with."""
        return self.second if name == self.first else self.first


def overlaps(plugins: Sequence[DevicePlugin], nodes: Mapping[str, Mapping[str, str]]) -> list[Overlap]:
    """The pairs among resources of one kind that select a same node. `nodes` are labels by the node's name."""
    chosen = {
        plugin.name: {name for name, labels in nodes.items() if effective_selector(plugin).items() <= labels.items()}
        for plugin in plugins
    }
    found: list[Overlap] = []
    for first, second in combinations(sorted(plugins, key=lambda each: each.name), 2):
        if shared := chosen[first.name] & chosen[second.name]:
            found.append(Overlap(first.kind, first.name, second.name, tuple(sorted(shared))))
    return found


def overlaps_of(
    plugin: DevicePlugin, others: Iterable[DevicePlugin], nodes: Mapping[str, Mapping[str, str]]
) -> list[Overlap]:
    """The overlaps of a resource with the others of its kind; what it was before may be among them."""
    there = [other for other in others if other.name != plugin.name]
    return [each for each in overlaps([plugin, *there], nodes) if plugin.name in (each.first, each.second)]


def told(overlap: Overlap, name: str) -> str:
    """A warning to the author of the named resource."""
    named = ", ".join(overlap.nodes[:_NAMED])
    more = f" and {len(overlap.nodes) - _NAMED} more" if len(overlap.nodes) > _NAMED else ""
    nodes = f"{'node' if len(overlap.nodes) == 1 else 'nodes'} {named}{more}"
    advice = "give the two node selectors that exclude each other"
    return f"{overlap.kind} {overlap.other(name)} selects {nodes} as well: {advice}"
