"""Why a selected node must not get its version now: `find_obstacles(...) -> obstacles by the name of the node`.

An obstacle concerns one node, and the others continue. Obstacles that follow from the step of a node are in `steps`.
"""

from collections.abc import Collection, Sequence

from accelplane.onload.models import Revision
from accelplane.onload.names import Names
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Obstacle
from accelplane.onload.rollout import first_mapping


def find_obstacles(
    names: Names,
    revision: Revision,
    nodes: Sequence[NodeView],
    *,
    seniority: Sequence[Names],
    reachable: Collection[str] | None,
) -> dict[str, Obstacle]:
    """The obstacles of selected nodes. `seniority` has the resources in the order of their creation.

    `reachable` are the nodes that Modules and DaemonSet select as long as they keep their former selector; None if they
    have that of the spec.
    """
    waiting = sorted(node.name for node in nodes if node.must_be_released)
    found: dict[str, Obstacle] = {}
    for node in nodes:
        if not node.selected:
            continue
        if (owner := _owner(names, node, seniority)) is not None:
            message = f"Onload {owner.namespace}/{owner.name} has the node; change a selector"
            found[node.name] = Obstacle("NodeOwned", message, "all")
        elif waiting and reachable is not None and node.name not in reachable and node.is_clean:
            message = f"waits for the release of node {waiting[0]}, which the selector does not match any more"
            found[node.name] = Obstacle("ReleasePending", message, "start")
        elif node.kernel and revision.kernel_mappings and not first_mapping(revision.kernel_mappings, node.kernel):
            message = f"no entry of spec.onload.kernelMappings matches kernel {node.kernel}; add one"
            found[node.name] = Obstacle("NoKernelMapping", message, "loading")
        elif node.cordoned:
            message = "the node is cordoned, so KMM loads no modules there; uncordon it"
            found[node.name] = Obstacle("Cordoned", message, "start")
    return found


def _owner(names: Names, node: NodeView, seniority: Sequence[Names]) -> Names | None:
    """The other resource that has a node. If both have labels there, that is the older resource."""
    ranks = {each: rank for rank, each in enumerate(seniority)}
    # Resources that are gone or being deleted leave the node.
    others = sorted(node.others, key=lambda each: (ranks.get(each, len(ranks)), each))
    if others and (node.is_clean or ranks.get(others[0], len(ranks)) < ranks.get(names, 0)):
        return others[0]
    return None
