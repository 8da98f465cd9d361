"""Which rules exclude a node for a waiting pod: taints, the node selector, and the required node affinity.

Facts: Kubernetes documentation "Taints and Tolerations" and "Assigning Pods to Nodes". Terms of an affinity are
alternatives, the requirements of a term are not. Rules about other pods are not evaluated.
"""

from collections.abc import Iterator, Mapping, Sequence

from accelplane.kube.kinds import NodeSelectorTerm, PodSpec, SelectorRequirement, Taint, Toleration

from .model import Node, Waiting

_EFFECTS = ("NoSchedule", "NoExecute")
_CORDONED = "node.kubernetes.io/unschedulable"


def obstacles(pod: Waiting, node: Node) -> Sequence[str]:
    """What excludes the node; empty if nothing here does."""
    return list(_obstacles(pod.spec, node))


def _obstacles(spec: PodSpec, node: Node) -> Iterator[str]:
    tolerations = spec.tolerations or ()
    cordon = Taint(_CORDONED, "", "NoSchedule")
    if node.cordoned and not _tolerated(cordon, tolerations):
        yield "cordoned"
    if not node.ready:
        yield "not ready"
    for taint in node.taints:
        if taint.effect in _EFFECTS and taint.key != _CORDONED and not _tolerated(taint, tolerations):
            value = f"={taint.value}" if taint.value else ""
            yield f"taint {taint.key}{value}:{taint.effect}"
    for key, value in (spec.nodeSelector or {}).items():
        if node.labels.get(key) != value:
            yield f"node selector {key}={value}, {_label(node.labels, key)}"
    required = spec.affinity and spec.affinity.nodeAffinity
    selector = required and required.requiredDuringSchedulingIgnoredDuringExecution
    terms = (selector.nodeSelectorTerms or ()) if selector else ()
    if selector and not any(_matches(term, node) for term in terms):
        failed = (each for term in terms for each in term.matchExpressions or () if not _holds(each, node.labels))
        first = next(failed, None)
        yield "required node affinity" + (f" {_words(first)}, {_label(node.labels, first.key)}" if first else "")


def _tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(
        each.effect in ("", taint.effect)
        and each.key in (("", taint.key) if each.operator == "Exists" else (taint.key,))
        # Later operators compare values; no exclusion is claimed for them.
        and (each.operator not in ("", "Equal") or each.value == taint.value)
        for each in tolerations
    )


def _matches(term: NodeSelectorTerm, node: Node) -> bool:
    expressions, fields = term.matchExpressions or (), term.matchFields or ()
    return bool(expressions or fields) and (
        all(_holds(each, node.labels) for each in expressions)
        and all(_holds(each, {"metadata.name": node.name}) for each in fields)
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
                number, limit = int(found or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return number > limit if requirement.operator == "Gt" else number < limit
        case _:
            return True


def _words(requirement: SelectorRequirement) -> str:
    values = f" ({', '.join(requirement.values)})" if requirement.values else ""
    return f"{requirement.key} {requirement.operator}{values}"


def _label(labels: Mapping[str, str], key: str) -> str:
    return f"the node has {labels[key]!a}" if key in labels else "the node has no such label"
