"""The decision of one reconciliation of an Onload resource, from what was read: `make_decision(...) -> Decision`.

A pure function: it computes what the operator writes, in the order of the fields of `Decision`.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from accelplane.onload.children import DesiredObjects, Existing, desired_objects
from accelplane.onload.models import Onload, Revision
from accelplane.onload.modules import KmmApi, names_of
from accelplane.onload.names import Names
from accelplane.onload.observed import NodeView
from accelplane.onload.obstacles import find_obstacles
from accelplane.onload.plan import ObservedWait, Plan, Target
from accelplane.onload.requirements import target_of
from accelplane.onload.rollout import Outcome, Rollout, known_history, plan_rollout, record_outcome, with_revision
from accelplane.onload.steps import decide


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """What a reconciliation reads. `kmm` is None if the resource does not use KMM.

    `seniority` has all resources in the order of their creation. `reachable` are the nodes that the existing objects
    select; None if all nodes of a former selector are released, so that the objects get the selector of the spec.
    """

    kmm: KmmApi | None
    existing: Existing
    nodes: Sequence[NodeView]
    seniority: Sequence[Names]
    reachable: Collection[str] | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a reconciliation writes: labels to the history, objects, and the actions of `plan`.

    `onload` is the resource with the revision that the nodes get.
    """

    rollout: Rollout
    onload: Onload
    objects: DesiredObjects
    target: Target
    plan: Plan

    def history(self, plan: Plan, now: str) -> tuple[Revision, ...]:
        """The history after the writes. `plan` is empty if they failed."""
        return record_outcome(self.rollout, outcome_of(plan, self.rollout.nodes), now)


def make_decision(
    onload: Onload, state: ClusterState, image: str, now: float, waits: Mapping[str, ObservedWait] | None = None
) -> Decision:
    """The decision about a resource. `image` is that of the device plugin, `now` a monotonic clock."""
    rollout = plan_rollout(onload, known_history(onload, state.existing, state.nodes), state.nodes)
    revision = rollout.target
    effective = with_revision(onload, revision)
    objects = desired_objects(
        effective,
        revision.label,
        image,
        state.kmm,
        state.existing,
        keeps_selector=state.reachable is not None,
        module_policy=revision.image_pull_policy,
    )
    obstacles = find_obstacles(
        names_of(onload), revision, state.nodes, seniority=state.seniority, reachable=state.reachable
    )
    target = target_of(effective, objects, state.nodes, rollout, obstacles)
    plan = decide(target, state.nodes, now, waits)
    return Decision(rollout=rollout, onload=effective, objects=objects, target=target, plan=plan)


def outcome_of(plan: Plan, nodes: Sequence[NodeView]) -> Outcome:
    """The outcome of the nodes with the target."""
    upgraded = {node.name for node in nodes if node.selected and node.progress is not None and node.progress.upgrade}
    if any(step.node in upgraded for step in plan.overdue):
        return "failed"
    return "complete" if plan.is_complete and any(step.step == "Verified" for step in plan.steps) else "progressing"
