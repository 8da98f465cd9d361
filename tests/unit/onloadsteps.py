"""Steps of one node to a target."""

from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Action, Target
from accelplane.onload.steps import decide

NEW, OLD = "8.2", "8.1"
TARGET = Target(version=NEW, revision="r")
NOW = 1000.0


def step(node: NodeView, target: Target = TARGET, now: float = NOW) -> tuple[str, dict[str, str | None]]:
    """The name of the step of a node, and the labels that it writes."""
    plan = decide(target, [node], now)
    (action,) = plan.actions or (None,)
    return plan.steps[0].step, dict(action.labels) if action else {}


def act(node: NodeView, target: Target = TARGET, now: float = NOW) -> Action:
    (action,) = decide(target, [node], now).actions
    return action
