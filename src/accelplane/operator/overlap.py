"""Nodes that two custom resources of a kind select. Both plugins register the same resources with the kubelet there.

Two GenericDevicePlugins may select a node if their resources differ, and only one of them is the DRA driver of a
domain.

    overlaps_of(plugin, others, nodes)       the overlaps of one resource, which may be about to change
    format_overlap(overlap, name)            an overlap as one line for the author of the named resource

Only node selectors are compared. Taints and tolerations, which may keep one of the pods away, change at any time.
"""

from collections.abc import Iterable, Mapping

import msgspec

from accelplane.operator.models import DevicePlugin, GenericSpec, PluginSpec, effective_selector
from accelplane.plugins.generic.config import DEFAULT_DOMAIN

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
    """The overlaps of a resource with the others of its kind, ordered by name.

    `others` may include the resource itself in an older state. `nodes` has the labels of each node by name.
    """
    own_nodes = _selected(plugin, nodes, nodes)
    found: list[Overlap] = []
    for other in sorted(others, key=lambda each: each.name):
        collides = other.name != plugin.name and _have_same_resources(plugin.spec, other.spec)
        if collides and (shared := _selected(other, own_nodes, nodes)):
            first, second = sorted((plugin.name, other.name))
            found.append(Overlap(plugin.kind, first, second, tuple(sorted(shared))))
    return found


def _have_same_resources(spec: PluginSpec, other: PluginSpec) -> bool:
    if isinstance(spec, GenericSpec) and isinstance(other, GenericSpec):
        return _driver(spec) == _driver(other) != "" or not _resources(spec).isdisjoint(_resources(other))
    return True


def _driver(spec: GenericSpec) -> str:
    """The DRA driver of the plugin, empty if it has none."""
    return (spec.domain or DEFAULT_DOMAIN) if spec.dra is not None and spec.dra.is_used else ""


def _resources(spec: GenericSpec) -> set[str]:
    return {f"{spec.domain or DEFAULT_DOMAIN}/{device.name}" for device in spec.devices}


def _selected(plugin: DevicePlugin, among: Iterable[str], nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    selector = effective_selector(plugin).items()
    return [name for name in among if selector <= nodes[name].items()]


def format_overlap(overlap: Overlap, name: str) -> str:
    """One line for the author of the named resource."""
    named = ", ".join(overlap.nodes[:_NAMED])
    more = f" and {len(overlap.nodes) - _NAMED} more" if len(overlap.nodes) > _NAMED else ""
    nodes = f"{'node' if len(overlap.nodes) == 1 else 'nodes'} {named}{more}"
    return f"{overlap.kind} {overlap.other(name)} also selects {nodes}; change one of the two node selectors"
