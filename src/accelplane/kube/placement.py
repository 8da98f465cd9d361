"""Which rules exclude a node for a waiting pod: taints, the node selector, and the required node affinity.

Facts: Kubernetes documentation "Taints and Tolerations" and "Assigning Pods to Nodes". Terms of an affinity are
alternatives, the requirements of a term are not. Rules about other pods are not evaluated.
"""

from collections.abc import Iterator, Mapping, Sequence

from .kinds import NodeSelectorTerm, PodSpec, SelectorRequirement, Taint, Toleration

_EFFECTS = ("NoSchedule", "NoExecute")
_CORDONED = "node.kubernetes.io/unschedulable"


def obstacles(
    spec: PodSpec, name: str, labels: Mapping[str, str], taints: Sequence[Taint], *, cordoned: bool, ready: bool
) -> Iterator[str]:
    """What excludes a node for a pod; nothing if no rule here does."""
    tolerations = spec.tolerations or ()
    if cordoned and not _tolerated(Taint(_CORDONED, "", "NoSchedule"), tolerations):
        yield "cordoned"
    if not ready:
        yield "not ready"
    for taint in taints:
        if taint.effect in _EFFECTS and taint.key != _CORDONED and not _tolerated(taint, tolerations):
            value = f"={taint.value}" if taint.value else ""
            yield f"taint {taint.key}{value} ({taint.effect})"
    for key, value in (spec.nodeSelector or {}).items():
        if labels.get(key) != value:
            yield f"node selector {key}={value}, {_label(labels, key)}"
    required = spec.affinity and spec.affinity.nodeAffinity
    selector = required and required.requiredDuringSchedulingIgnoredDuringExecution
    terms = (selector.nodeSelectorTerms or ()) if selector else ()
    if selector and not any(_matches(term, name, labels) for term in terms):
        failed = (each for term in terms for each in term.matchExpressions or () if not _holds(each, labels))
        first = next(failed, None)
        yield "required node affinity" + (f" {_words(first)}, {_label(labels, first.key)}" if first else "")


def _tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(
        each.effect in ("", taint.effect)
        and each.key in (("", taint.key) if each.operator == "Exists" else (taint.key,))
        # Later operators compare values; no exclusion is claimed for them.
        and (each.operator not in ("", "Equal") or each.value == taint.value)
        for each in tolerations
    )


def _matches(term: NodeSelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = term.matchExpressions or (), term.matchFields or ()
    return bool(expressions or fields) and (
        all(_holds(each, labels) for each in expressions)
        and all(_holds(each, {"metadata.name": name}) for each in fields)
    )


def _holds(requirement: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    found, values = labels.get(requirement.key), requirement.values or ()
    match requirement.operator:
        case "In":
            return found in values
        case "NotIn":
            return found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt":
            try:
                number, limit = int(found or ""), int("".join(values))
            except ValueError:
                return False
            return number > limit if requirement.operator == "Gt" else number < limit
        case _:
            return True


def _words(requirement: SelectorRequirement) -> str:
    values = f" ({', '.join(requirement.values)})" if requirement.values else ""
    return f"{requirement.key} {requirement.operator}{values}"


def _label(labels: Mapping[str, str], key: str) -> str:
    return f"the node has {labels[key]!a}" if key in labels else "the node has no such label"
