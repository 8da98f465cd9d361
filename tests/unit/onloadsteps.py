"""Steps of one node to a target."""

import msgspec

from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Action, Plan, Target
from accelplane.onload.steps import decide
from accelplane.onload.waits import OBSERVATION_INTERVAL

NEW, OLD = "8.2", "8.1"
TARGET = Target(version=NEW, revision="r")
NOW = 1000.0


def waited(seconds: float, *nodes: NodeView, target: Target = TARGET) -> Plan:
    """The plan after the operator has observed for this long that the nodes do not change."""
    plan, passed = decide(target, nodes, NOW), 0.0
    while passed < seconds:
        passed = min(seconds, passed + OBSERVATION_INTERVAL)
        plan = decide(target, nodes, NOW + passed, plan.waits)
    return plan


def step(node: NodeView, target: Target = TARGET, seconds: float = 0) -> tuple[str, dict[str, str | None]]:
    """The name of the step of a node after a time of waiting, and the labels that it writes."""
    plan = waited(seconds, node, target=target)
    (action,) = plan.actions or (None,)
    return plan.steps[0].step, dict(action.labels) if action else {}


def act(node: NodeView, target: Target = TARGET, now: float = NOW) -> Action:
    (action,) = decide(target, [node], now).actions
    return action


def with_sfc(target: Target = TARGET) -> Target:
    return msgspec.structs.replace(target, sfc=True)
