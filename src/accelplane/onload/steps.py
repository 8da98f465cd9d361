"""The next actions on the nodes of one Onload resource: `decide(target, nodes, now, waits) -> Plan`. A pure function.

Each node is in one step (`node_steps`), which follows from its labels, its pods and the annotation with its progress.
This module limits how many nodes change at the same time.

The first step of a node that works counts as its start. At most `max_unavailable` nodes are between start and
verification. No node starts while the upgrade is paused, or if a node exceeded its time limit. A node with an obstacle
does not start. `now` is a monotonic clock.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from accelplane.onload.node_steps import NodeSteps, blocked, was_stopped
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import DONE, NodeStep, ObservedWait, Obstacle, Plan, Target
from accelplane.onload.waits import is_overdue, observe, retry_after, waiting_in

# One phase per node: nothing changes, its change would start now, it is unavailable because of its change, or it is a
# new node that gets its first version.
Phase = Literal["steady", "starting", "down", "joining"]


def decide(
    target: Target, nodes: Sequence[NodeView], now: float, waits: Mapping[str, ObservedWait] | None = None
) -> Plan:
    """The actions of this pass. `waits` are those of the plan before; without them, all waiting begins now."""
    ordered = sorted(nodes, key=lambda each: each.name)
    observed = {node.name: observe(target, node, now, (waits or {}).get(node.name)) for node in ordered}
    steps = [NodeSteps(target, node, now, observed[node.name].seconds).step() for node in ordered]
    observed = {step.node: waiting_in(step, observed[step.node]) for step in steps}
    pairs = list(zip(ordered, steps, strict=True))
    overdue = tuple(step for step in steps if is_overdue(step, observed[step.node]))
    down = [(node, step) for node, step in pairs if _phase(target, node, step) == "down"]
    # A node that was lost during an upgrade must not prevent the rollback of the others.
    down = [(node, step) for node, step in down if node.ready or not target.rolls_back]
    # Nor must a node that was excluded by the selector prevent the change of the others.
    counted = [(node, step) for node, step in down if node.selected or (node.ready and step not in overdue)]
    failed = any(step in overdue for node, step in counted if node.selected)
    free = target.max_unavailable - len(counted)
    if not target.deleting and (target.paused or failed):
        free = 0
    decided: list[NodeStep] = []
    for node, step in pairs:
        if (obstacle := _obstacle(target, node, step)) is not None:
            decided.append(blocked(node, obstacle.step, obstacle.message))
        elif not step.starts or target.deleting:
            decided.append(step)
        elif not node.ready:
            decided.append(blocked(node, "NodeNotReady", "the node is not ready"))
        elif free > 0:
            free -= 1
            decided.append(step)
        else:
            decided.append(blocked(node, "Pending", _pending(target, failed=failed)))
    return Plan(
        steps=tuple(decided),
        actions=tuple(step.action for step in decided if step.action is not None),
        overdue=overdue,
        waits=observed,
        unavailable=len(counted),
        retry=retry_after(decided, observed),
    )


# Phases


def _phase(target: Target, node: NodeView, step: NodeStep) -> Phase:
    """Without an annotation, the Go operator has started the change of a node."""
    if step.starts:
        return "starting"
    if step.step in DONE and node.progress is None:
        return "steady"
    is_down = node.progress.upgrade if node.progress is not None else was_stopped(target, node)
    return "down" if is_down else "joining"


def _obstacle(target: Target, node: NodeView, step: NodeStep) -> Obstacle | None:
    """What prevents the step of a selected node. The installation on a new node is a change that begins."""
    if target.deleting or not node.selected:
        return None
    phase, found = _phase(target, node, step), target.obstacles.get(node.name)
    begins = phase == "starting" or (phase == "joining" and step.action is not None and node.progress is None)
    loads = step.step in {"LabellingSfc", "LabellingModule"}
    if found is not None and (found.blocks == "all" or begins or (found.blocks == "loading" and loads)):
        return found
    if node.held and begins:
        return Obstacle("Held", "the node has the annotation onload.amd.com/hold", "start")
    return None


def _pending(target: Target, *, failed: bool) -> str:
    if failed:
        return "a node exceeded its time limit, so no other node starts"
    if target.paused:
        return "the upgrade is paused"
    return f"at most {target.max_unavailable} nodes are changed at the same time"
