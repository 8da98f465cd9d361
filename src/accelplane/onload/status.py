"""The status of an Onload resource: `status(onload, observed, now) -> Status`.

Conditions (all are always set):

    Ready           the version is verified on all selected nodes
    Progressing     nodes are changed, or wait for their change
    Degraded        something needs attention: see the reason

The transition time of a condition changes with its status only, so equal states have equal statuses.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from accelplane.kube.conditions import condition, with_transition_times
from accelplane.onload.models import CurrentNode, DevicePluginStatus, Onload, OnloadStatus, Revision, Status
from accelplane.onload.observed import BlockedEviction, NodeView
from accelplane.onload.plan import DONE, NOT_STARTED, NodeStep, Plan, Problem, Target
from accelplane.onload.resources import DaemonSetStatus

READY, PROGRESSING, DEGRADED = "Ready", "Progressing", "Degraded"
_NAMED = 3
# Nodes with an obstacle of their own are listed although their change has not begun.
_NAMED_STEPS = NOT_STARTED - {"Pending"} | {"NotReachable"}
_MAX_CURRENT = 50


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of a reconciliation. `blocking` are pods whose eviction was rejected."""

    target: Target
    plan: Plan = Plan()
    nodes: Sequence[NodeView] = ()
    daemonset: DaemonSetStatus | None = None
    history: tuple[Revision, ...] = ()
    rolled_back: str = ""
    blocking: Sequence[BlockedEviction] = ()
    problems: Sequence[Problem] = ()


def status(onload: Onload, observed: Observation, now: str) -> Status:
    """The status after a reconciliation, from the one before. `now` is the time as the API writes it."""
    target, selected = observed.target, [node for node in observed.nodes if node.selected]
    pods = observed.daemonset or DaemonSetStatus()
    steps = {step.node: step for step in observed.plan.steps}
    verified = [node for node in selected if (step := steps.get(node.name)) is not None and step.step == "Verified"]
    findings = (_ready(observed, len(selected), len(verified)), _progressing(observed), _degraded(observed))
    before = onload.status.conditions if onload.status is not None else ()
    conditions = [condition(*each, generation=onload.metadata.generation, now=now) for each in findings]
    return Status(
        onload=OnloadStatus(
            version=target.version,
            nodes_matching=len(selected),
            nodes_labelled=sum(_is_labelled(target, node) for node in selected),
            nodes_module_ready=sum(node.module_loaded for node in selected),
            nodes_upgraded=len(verified),
            current_nodes=tuple(_current(observed, steps))[:_MAX_CURRENT],
            blocking_pods=tuple(sorted(each.pod for each in observed.blocking)),
            history=tuple(_with_nodes(each, observed.nodes) for each in observed.history),
        ),
        device_plugin=DevicePluginStatus(desired=pods.desired_number_scheduled, ready=pods.number_ready),
        conditions=with_transition_times(before, conditions),
        observed_generation=onload.metadata.generation,
    )


class _Finding(NamedTuple):
    """The arguments of `condition`."""

    type: str
    holds: bool
    reason: str
    message: str


def _ready(observed: Observation, selected: int, verified: int) -> _Finding:
    if observed.problems and not observed.plan.steps:
        return _Finding(READY, False, *observed.problems[0])
    if observed.target.deleting:
        return _Finding(READY, False, "Deleting", "the resource is being deleted: its nodes are released")
    if not observed.plan.is_complete or verified < selected:
        waiting = next((step for step in observed.plan.steps if step.step not in DONE), None)
        more = f"; {_waiting(waiting)}" if waiting is not None else ""
        return _Finding(READY, False, "NodesNotReady", f"{verified} of {selected} nodes are verified{more}")
    if observed.rolled_back:
        message = (
            f"version {observed.rolled_back} failed; {verified} of {selected} nodes are verified with earlier versions"
        )
        return _Finding(READY, False, "RolledBack", message)
    if not selected:
        return _Finding(READY, True, "NoNodes", "no node is selected")
    unreported = [node.name for node in observed.nodes if node.selected and not node.module_loaded]
    message = f"{verified} of {selected} nodes are verified"
    if observed.target.kmm and unreported:
        message += f"; KMM reports no loaded modules on {_listed(unreported)}"
    return _Finding(READY, True, "AllNodesReady", message)


def _progressing(observed: Observation) -> _Finding:
    changing = [step for step in observed.plan.steps if step.step not in DONE]
    if not changing:
        return _Finding(PROGRESSING, False, "Complete", "no node is changed")
    active = next((step for step in changing if step.step not in NOT_STARTED), None)
    if active is None:
        reason = "Paused" if observed.target.paused else changing[0].step
        return _Finding(PROGRESSING, False, reason, _waiting(changing[0]))
    waits = active.step in {"WaitingForModulePods", "WaitingForModule", "WaitingForSfc"}
    reason = active.step if waits else "NodeUpgrading"
    return _Finding(PROGRESSING, True, reason, _waiting(active))


def _degraded(observed: Observation) -> _Finding:
    if found := problems(observed):
        return _Finding(DEGRADED, True, found[0].reason, "; ".join(each.message for each in found))
    return _Finding(DEGRADED, False, "AsExpected", "no errors")


def problems(observed: Observation) -> list[Problem]:
    """Everything that needs attention, the most important first."""
    found = list(observed.problems)
    if observed.rolled_back:
        message = (
            f"version {observed.rolled_back} failed; nodes return to {observed.target.version}; correct spec.onload"
        )
        found.append(Problem("RolledBack", message))
    found += [
        Problem("NodeTimeout", f"{_waiting(step)}: exceeded its time limit; correct the node or the spec")
        for step in observed.plan.overdue[:_NAMED]
    ]
    with_problem = [(step.node, step.problem) for step in observed.plan.steps if step.problem is not None]
    found += [Problem(each.reason, f"node {node}: {each.message}") for node, each in with_problem[:_NAMED]]
    if observed.blocking:
        found.append(Problem("EvictionBlocked", blocked_message(observed.blocking)))
    return found


def blocked_message(blocked: Sequence[BlockedEviction]) -> str:
    """The pods that cannot be evicted, with reason and remedy."""
    reasons = (
        (True, "a PodDisruptionBudget does not allow the eviction of {}; change the budget or delete the pods"),
        (False, "the API server rejects the eviction of {}; correct the cause or delete the pods"),
    )
    found: list[str] = []
    for by_budget, text in reasons:
        pods = [each for each in sorted(blocked) if each.by_budget == by_budget]
        if pods:
            found.append(text.format(_listed([_with_message(each) for each in pods])))
    return "; ".join(found)


def _with_message(blocked: BlockedEviction) -> str:
    return f"{blocked.pod} ({blocked.message.rstrip('.')})" if blocked.message else blocked.pod


def _is_labelled(target: Target, node: NodeView) -> bool:
    label = target.label_of(node.name)
    return (node.module == label or not target.kmm) and node.gate == label


def _with_nodes(revision: Revision, nodes: Sequence[NodeView]) -> Revision:
    labels = (node.module if revision.kernel_mappings else node.gate for node in nodes)
    return msgspec.structs.replace(revision, nodes=sum(label == revision.label for label in labels))


def _current(observed: Observation, steps: dict[str, NodeStep]) -> list[CurrentNode]:
    return [
        CurrentNode(
            name=node.name,
            step=steps[node.name].step,
            since=_time(node.progress.started) if node.progress is not None else "",
            message=steps[node.name].message,
            verified=node.verified.label if node.verified is not None else "",
            target=observed.target.label_of(node.name) if node.selected else "",
        )
        for node in observed.nodes
        if node.name in steps
        and steps[node.name].step != "Verified"
        and (node.progress is not None or steps[node.name].action is not None or steps[node.name].step in _NAMED_STEPS)
    ]


def _waiting(step: NodeStep) -> str:
    return f"node {step.node}: {step.message or step.step}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""
