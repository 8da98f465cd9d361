"""Nodes on which two custom resources of a kind meet: both plugins would register the same resources with the kubelet.

    overlaps_of(plugin, others, nodes)       those of one resource, which may be about to change
    told(overlap, name)                      one of them in a sentence to the author of one of the two

Only node selectors are compared: whether taints keep one of the pods away may change at any time.
"""

from collections.abc import Iterable, Mapping

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


def overlaps_of(
    plugin: DevicePlugin, others: Iterable[DevicePlugin], nodes: Mapping[str, Mapping[str, str]]
) -> list[Overlap]:
    """The overlaps of a resource with the others of its kind, by their names; what it was before may be among them.

    `nodes` are labels by the node's name.
    """
    mine = _selected(plugin, nodes, nodes)
    found: list[Overlap] = []
    for other in sorted(others, key=lambda each: each.name):
        if other.name != plugin.name and (shared := _selected(other, mine, nodes)):
            first, second = sorted((plugin.name, other.name))
            found.append(Overlap(plugin.kind, first, second, tuple(sorted(shared))))
    return found


def _selected(plugin: DevicePlugin, among: Iterable[str], nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    selector = effective_selector(plugin).items()
    return [name for name in among if selector <= nodes[name].items()]


def told(overlap: Overlap, name: str) -> str:
    """A warning to the author of the named resource."""
    named = ", ".join(overlap.nodes[:_NAMED])
    more = f" and {len(overlap.nodes) - _NAMED} more" if len(overlap.nodes) > _NAMED else ""
    nodes = f"{'node' if len(overlap.nodes) == 1 else 'nodes'} {named}{more}"
    advice = "give the two node selectors that exclude each other"
    return f"{overlap.kind} {overlap.other(name)} selects {nodes} as well: {advice}"
