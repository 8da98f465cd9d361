"""What a resource must fulfil before the operator writes anything, and what follows from its spec as numbers.

problem_of(onload)                  the first problem, if any
target_of(onload, ...)              the target of its nodes
overlaps(onload, others, nodes)     resources that select the same nodes
"""

from collections.abc import Iterable, Mapping, Sequence

from accelplane.kube.names import is_label_value
from accelplane.onload.children import Wanted
from accelplane.onload.models import DEFAULT_NODE_TIMEOUT, Onload, UpgradeSpec, options_of, seconds, uses_kmm, uses_sfc
from accelplane.onload.modules import names_of
from accelplane.onload.names import too_long
from accelplane.onload.observed import NodeView
from accelplane.onload.status import Problem
from accelplane.onload.steps import Target

_NAMED = 3


def problem_of(onload: Onload) -> Problem | None:
    """What prevents that the resource is reconciled."""
    spec, names = onload.spec, names_of(onload)
    if message := too_long(names):
        return Problem("NameTooLong", message)
    if "." in names.name:
        message = f"metadata.name is {names.name!a}, expected a name without dots, which KMM cannot use in labels"
        return Problem("InvalidName", f"{message}; create a resource of another name")
    if not spec.selector:
        message = "spec.selector is empty, expected labels of nodes; write for example the label of the worker nodes"
        return Problem("InvalidSelector", message)
    if not spec.onload.version or not is_label_value(spec.onload.version):
        message = f"spec.onload.version is {spec.onload.version!a}, expected a label value of 1 to 63 characters"
        return Problem("InvalidVersion", f"{message}; use letters, digits, -, _ and .")
    if uses_kmm(spec.onload) and not spec.onload.kernel_mappings:
        message = "spec.onload.kernelMappings is empty, expected at least one mapping"
        return Problem("InvalidSpec", f"{message}; add one, or set moduleManagement to External")
    options = options_of(spec.device_plugin)
    if options.set_preload and options.mount_onload:
        return Problem("InvalidSpec", "SetPreload and MountOnload mutually exclusive; set one of them to false")
    return _invalid_durations(spec.upgrade or UpgradeSpec())


def target_of(onload: Onload, made: Wanted, nodes: Sequence[NodeView], *, version: str, rolls_back: bool) -> Target:
    """The target of the nodes. A rollback changes one node at a time."""
    upgrade = onload.spec.upgrade or UpgradeSpec()
    selected = sum(node.selected for node in nodes)
    verify = upgrade.verify
    return Target(
        version=version,
        sfc=uses_sfc(onload.spec.onload),
        kmm=uses_kmm(onload.spec.onload),
        revision=made.revision,
        adopted=made.adopted,
        max_unavailable=1 if rolls_back else max_unavailable(upgrade.max_unavailable, selected),
        paused=upgrade.paused,
        node_timeout=seconds(upgrade.node_timeout) if upgrade.node_timeout else DEFAULT_NODE_TIMEOUT,
        eviction_timeout=seconds(upgrade.eviction_timeout) if upgrade.eviction_timeout else 0.0,
        strict=verify is not None and verify.strict,
        probe=verify is not None and verify.probe is not None,
    )


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
        if names_of(other) != names_of(onload) and other.spec.selector and shared:
            there = names_of(other)
            message = f"Onload {there.namespace}/{there.name} also selects {_listed(shared)}; change a selector"
            found.append(Problem("SelectorOverlap", message))
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names[:_NAMED])}{more}"


def _invalid_durations(upgrade: UpgradeSpec) -> Problem | None:
    for field, value in (("nodeTimeout", upgrade.node_timeout), ("evictionTimeout", upgrade.eviction_timeout)):
        try:
            seconds(value or "1s")
        except ValueError as error:
            return Problem("InvalidSpec", f"spec.upgrade.{field} is {error}")
    return None
