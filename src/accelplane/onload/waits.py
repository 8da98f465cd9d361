"""How long nodes wait: the seconds for which the operator observed a node in its present step.

Time during which the operator did not run, or was stopped, does not count. The clock is monotonic.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from accelplane.onload.observed import NodeView
from accelplane.onload.plan import NodeStep, ObservedWait, Target

# While a node waits, it is observed at this interval. Of a longer pause of the operator, this much counts as waiting.
OBSERVATION_INTERVAL = 30.0


def observe(target: Target, node: NodeView, now: float, before: ObservedWait | None) -> ObservedWait:
    """The waiting of a node until now."""
    labels = (node.module, node.sfc, node.gate)
    stage = (target.label_of(node.name), target.revision, target.deleting, node.selected, node.cordoned, *labels)
    if before is None or before.stage != stage:
        return ObservedWait(stage, now)
    seconds = {**before.seconds}
    if before.step:
        passed = min(max(0.0, now - before.time), OBSERVATION_INTERVAL)
        seconds[before.step] = seconds.get(before.step, 0.0) + passed
    return ObservedWait(stage, now, "", seconds)


def waiting_in(step: NodeStep, observed: ObservedWait) -> ObservedWait:
    return msgspec.structs.replace(observed, step=step.step if step.wait is not None else "")


def is_overdue(step: NodeStep, observed: ObservedWait) -> bool:
    return step.wait is not None and observed.seconds.get(step.step, 0.0) >= step.wait.limit


def retry_after(steps: Sequence[NodeStep], observed: Mapping[str, ObservedWait]) -> float:
    """The seconds until something happens without a change of the cluster; 0 for never."""
    following = math.inf
    for step in steps:
        if step.wait is None:
            continue
        remaining = step.wait.limit - observed[step.node].seconds.get(step.step, 0.0)
        if 0 < remaining < math.inf:
            following = min(following, remaining, OBSERVATION_INTERVAL)
        following = min(following, step.wait.retry)
    return max(0.1, following) if following < math.inf else 0.0
