"""Rollouts on a model of a cluster, with any order of events: invariants, and the end state.

The invariants are in `onloadworld`. Each example is a defect that was corrected.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onloadworld import BROKEN, Spec, World

from accelplane.onload import rollout
from accelplane.onload.models import Onload, Revision
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import NodeStep, ObservedWait, Target

Events = list[tuple[str, Any]]

SPECS = st.builds(
    Spec,
    version=st.sampled_from(["8.1", "8.1", "8.2"]),
    five=st.sampled_from(["a", "a", "b", "b", BROKEN]),
    six=st.sampled_from(["a", "a", "b", "b", BROKEN, ""]),
    appended=st.booleans(),
    sfc=st.booleans(),
    user=st.sampled_from(["u", "v"]),
)
NODE = st.integers(0, 2)
OF_NODE = (
    *("app", "app", "protect", "hang", "ready", "held", "cordoned", "selected", "unlabel", "ungate", "other", "lag"),
    "kernel",
)
EVENTS = st.one_of(
    st.tuples(st.just("tick"), st.integers(1, 12)),
    st.tuples(st.just("tick"), st.integers(1, 40)),
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("clock"), st.sampled_from([20.0, 3600.0, -3600.0])),
    st.tuples(st.sampled_from(["restart", "senior", "paused"]), st.none()),
    st.tuples(st.sampled_from(OF_NODE), NODE),
    st.tuples(st.sampled_from(OF_NODE), NODE),
)


def spec(*args: Any, **fields: Any) -> tuple[str, Spec]:
    return "spec", Spec(*args, **fields)


BACK, OTHER_BUILD, SECOND = spec("8.1", "a", "a"), spec("8.1", "b", "b"), spec("8.2", "a", "a")
FAILS = spec("8.2", BROKEN, BROKEN)
# The label of a version stands for another image while nodes have it.
REINSTALLED: Events = [("app", 1), ("protect", 1), SECOND, ("tick", 4), OTHER_BUILD, ("tick", 12)]
# Nodes that still have the modules are drained by a revert.
REVERTED: Events = [("app", 0), ("protect", 0), OTHER_BUILD, ("tick", 4), BACK, ("tick", 12)]
LONG_EVICTION: Events = [("app", 0), ("protect", 0), SECOND, ("tick", 90), ("protect", 0), ("tick", 12)]
CLOCK: Events = [SECOND, ("tick", 1), ("lag", 0), ("tick", 2), ("clock", 3600.0), ("tick", 2)]
# The rollback goes to an older version than the nodes were verified on.
HELD: Events = [("held", 1), OTHER_BUILD, ("tick", 20), FAILS, ("tick", 90)]
# Another resource has the node.
SHARED: Events = [("selected", 0), ("tick", 12), ("other", 0), ("selected", 0), ("tick", 3)]
RELEASED: Events = [("app", 0), ("other", 0), ("selected", 0), ("tick", 9)]
# A mapping that no node uses is appended before, or while, other content is rolled out.
APPENDED: Events = [
    spec("8.1", "a", "a", True), ("tick", 4), ("app", 0), ("protect", 0), OTHER_BUILD, ("tick", 4), BACK, ("tick", 4),
]  # fmt: skip
APPENDED_MIDWAY: Events = [
    OTHER_BUILD, ("tick", 1), spec("8.1", "b", "b", True), ("tick", 30), ("app", 0), OTHER_BUILD, ("tick", 30),
]  # fmt: skip
# The images of the other kernel change.
OTHER_KERNEL: Events = [("app", 0), spec("8.1", "a", "b"), ("tick", 40), spec("8.1", "a", "a"), ("tick", 40)]
# A node that kept its label restarts with another kernel: KMM loads nothing there.
NEW_KERNEL: Events = [spec("8.1", "a", "b"), ("tick", 40), ("kernel", 0), ("tick", 90)]


def play(events: Events, count: int, limit: int) -> World:
    """The world after the events. A violation of an invariant is an AssertionError."""
    world = World(count, limit)
    for kind, value in [("tick", 12), *events]:
        if kind == "tick":
            for _ in range(value):
                world.tick()
        else:
            world.event(kind, value)
        assert world.most_down <= limit
    return world


@pytest.mark.untraced
@example(events=REINSTALLED, count=2, limit=1)
@example(events=REVERTED, count=2, limit=1)
@example(events=LONG_EVICTION, count=1, limit=1)
@example(events=CLOCK, count=1, limit=1)
@example(events=HELD, count=2, limit=1)
@example(events=SHARED, count=2, limit=1)
@example(events=RELEASED, count=2, limit=1)
@example(events=APPENDED, count=2, limit=1)
@example(events=APPENDED_MIDWAY, count=2, limit=1)
@example(events=OTHER_KERNEL, count=2, limit=1)
@example(events=NEW_KERNEL, count=2, limit=1)
@settings(deadline=None, max_examples=60)
@given(events=st.lists(EVENTS, max_size=40), count=st.integers(1, 3), limit=st.integers(1, 2))
def test_any_order_of_events_keeps_applications_running_and_ends_in_the_desired_state(
    events: Events, count: int, limit: int
) -> None:
    world = play(events, count, limit)
    world.remove_obstacles()
    passes = 0
    while world.tick():
        passes += 1
        assert passes < 400, [(each.node, each.step, each.message) for each in world.reconcile().steps]
    found = world.decision().rollout
    for name, node in world.nodes.items():
        if not node.selected:
            assert node.is_clean
        elif not found.rolls_back:
            assert (world.has(name), node.module, node.progress) == (world.wanted(name, found), node.gate, None)


# Defects of former versions, to check that the model detects them.


def reuse_label(onload: Onload, history: Sequence[Revision], nodes: Sequence[NodeView]) -> Revision:
    """The label is the version, whatever it stands for on nodes."""
    found = DESIRED(onload, history, nodes)
    return msgspec.structs.replace(found, label=found.version)


def new_label(onload: Onload, history: Sequence[Revision], nodes: Sequence[NodeView]) -> Revision:
    """The content of a label is known for the newest entry only."""
    return DESIRED(onload, history[:1], nodes)


def newest_verified(_node: NodeView, history: Sequence[Revision]) -> Revision | None:
    return next((each for each in history if each.state == "Verified"), None)


def observe_total(target: Target, _node: NodeView, now: float, before: ObservedWait | None) -> ObservedWait:
    """All time since the begin of a change counts as waiting in each step."""
    stage = (target.version,)
    if before is None or before.stage != stage:
        return ObservedWait(stage, now)
    return ObservedWait(stage, now, "", {"": before.seconds.get("", 0.0) + now - before.time})


def exceeds_total(step: NodeStep, observed: ObservedWait) -> bool:
    return step.wait is not None and observed.seconds.get("", 0.0) >= step.wait.limit


DESIRED = rollout._desired
Patches = dict[str, Callable[..., object]]
DEFECTS: list[tuple[Patches, Events, str]] = [
    ({"rollout._desired": reuse_label}, REINSTALLED, "is unloaded or reloaded under"),
    ({"rollout._desired": new_label, "rollout._kept_labels": lambda *_: {}}, REVERTED, "is drained and has"),
    ({"steps.observe": observe_total, "steps.is_overdue": exceeds_total}, LONG_EVICTION, "failed by waiting alone"),
    ({"rollout._verified_revision": newest_verified}, HELD, "does not return to what it was verified on"),
    ({"obstacles._owner": lambda *_: None}, SHARED, "the node of another resource is labelled"),
    ({"rollout._kept_labels": lambda *_: {}}, OTHER_KERNEL, "is drained and has"),
    ({"rollout._kept_labels": lambda *_: {}}, APPENDED_MIDWAY, "is drained and has"),
]


@pytest.mark.parametrize(("patches", "events", "violation"), DEFECTS)
def test_the_model_detects_defects_of_former_versions(
    patches: Patches, events: Events, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in patches.items():
        monkeypatch.setattr(f"accelplane.onload.{name}", function)
    with pytest.raises(AssertionError, match=violation):
        play(events, 2, 1)
