"""Preconditions of a resource for all writes of the operator, and numeric values derived from its spec.

problem_of(onload)                            the first problem, if any
target_of(onload, ...)                        the target of its nodes
overlaps(onload, others, nodes)               resources that select the same nodes
load_order_problems(names, target, nodes)     nodes whose modules are not loaded in their order
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from accelplane.kube.rules import broken_rules
from accelplane.onload.children import DesiredObjects
from accelplane.onload.models import (
    DEFAULT_MIN_READY,
    DEFAULT_NODE_TIMEOUT,
    Onload,
    Revision,
    UpgradeSpec,
    Verify,
    seconds,
    uses_kmm,
    uses_sfc,
)
from accelplane.onload.modules import names_of
from accelplane.onload.names import Names, has_dots, too_long
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Obstacle, Problem, Target
from accelplane.onload.rollout import Rollout, first_mapping
from accelplane.onload.rules import DEVICE_PLUGIN, SPEC, duration_errors

_NAMED = 3


def problem_of(onload: Onload) -> Problem | None:
    """Problems that prevent reconciliation: broken admission rules that have a reason."""
    spec, names = onload.spec, names_of(onload)
    if message := too_long(names):
        return Problem("NameTooLong", message)
    if message := has_dots(names):
        return Problem("InvalidName", message)
    broken = (*broken_rules(spec, SPEC), *broken_rules(spec.device_plugin, DEVICE_PLUGIN))
    found = [Problem(rule.reason, message) for rule, message in broken if rule.reason]
    found += [Problem("InvalidSpec", message) for message in duration_errors(spec.upgrade)]
    return found[0] if found else None


def target_of(
    onload: Onload,
    made: DesiredObjects,
    nodes: Sequence[NodeView],
    rollout: Rollout,
    obstacles: Mapping[str, Obstacle] = MappingProxyType({}),
) -> Target:
    """The target of the nodes. A rollback changes one node at a time."""
    upgrade = onload.spec.upgrade or UpgradeSpec()
    selected = sum(node.selected for node in nodes)
    verify = upgrade.verify
    return Target(
        version=rollout.target.label,
        sfc=uses_sfc(onload.spec.onload),
        kmm=uses_kmm(onload.spec.onload),
        revision=made.revision,
        adopted_revision=made.adopted_revision,
        max_unavailable=1 if rollout.rolls_back else max_unavailable(upgrade.max_unavailable, selected),
        paused=upgrade.paused,
        node_timeout=seconds(upgrade.node_timeout) if upgrade.node_timeout else DEFAULT_NODE_TIMEOUT,
        eviction_timeout=seconds(upgrade.eviction_timeout) if upgrade.eviction_timeout else 0.0,
        min_ready=_min_ready(verify),
        strict=verify is not None and verify.strict,
        probe=verify is not None and verify.probe is not None,
        rolls_back=rollout.rolls_back,
        others=rollout.others,
        keeps=rollout.keeps,
        without_sfc=frozenset(node.name for node in nodes if _needs_no_sfc(rollout.target, node.kernel)),
        obstacles=obstacles,
    )


def _needs_no_sfc(revision: Revision, kernel: str) -> bool:
    mapping = first_mapping(revision.kernel_mappings, kernel) if kernel else None
    return mapping is not None and mapping.sfc is None


def _min_ready(verify: Verify | None) -> int:
    chosen = verify.min_ready_seconds if verify is not None else None
    return DEFAULT_MIN_READY if chosen is None else chosen


def max_unavailable(value: int | str | None, selected: int) -> int:
    """The number of nodes of a number or a percentage, at least 1. A percentage is rounded up."""
    text = str(value)
    if text.endswith("%") and text[:-1].isdecimal() and len(text) <= 4:
        return max(1, -(-selected * int(text[:-1]) // 100))
    return max(1, int(text)) if text.isdecimal() and len(text) <= 9 else 1


def overlaps(onload: Onload, others: Iterable[Onload], nodes: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """The other resources that select nodes of this one: both device plugins have the same socket and files."""
    mine = [name for name, labels in nodes.items() if onload.spec.selector.items() <= labels.items()]
    found: list[Problem] = []
    for other in sorted(others, key=names_of):
        shared = sorted(name for name in mine if other.spec.selector.items() <= nodes[name].items())
        if names_of(other) != names_of(onload) and shared:
            there = names_of(other)
            message = f"Onload {there.namespace}/{there.name} also selects {_listed(shared)}; change a selector"
            found.append(Problem("SelectorOverlap", message))
    return found


def load_order_problems(names: Names, target: Target, nodes: Iterable[NodeView]) -> list[Problem]:
    """Nodes on which KMM reports `onload` and not `sfc`: `onload` may use the kernel's own `sfc`.

    KMM 1.1 starts both loaders simultaneously after a reboot. The loader of `sfc` then cannot remove the kernel's own
    driver, because `onload` uses it.
    """
    found = sorted(
        node.name
        for node in nodes
        if node.selected and node.ready and node.gate is not None and target.kmm and target.sfc
        if node.name not in target.without_sfc
        and node.module == node.sfc == target.label_of(node.name)
        and node.module_loaded
        and not node.sfc_loaded
    )
    if not found:
        return []
    message = (
        f"{_listed(found)}: KMM reports the module onload and not sfc, expected both; after a reboot, KMM 1.1 may load "
        "onload on the kernel's own sfc. Delete the pods that use Onload there, then remove the labels "
        f"{names.module_label} and {names.sfc_label} of the node: the operator loads both modules in their order"
    )
    return [Problem("SfcNotLoaded", message)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names[:_NAMED])}{more}"
