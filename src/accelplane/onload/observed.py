"""The observed state of the nodes of one Onload resource, as immutable values.

    view(node, names, selector, pods)               one node with the pods that matter
    parse_progress(text)                            the annotation with the progress of a node

An upgrade has no other state than these: labels and the annotation of the nodes, and the pods. So it continues after a
restart of the operator at any point.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from accelplane.kube.objects import Request
from accelplane.onload.models import KIND
from accelplane.onload.names import (
    GROUP,
    HOLD_ANNOTATION,
    KMM_POD_LABEL,
    NAME_LABEL,
    REVISION_ANNOTATION,
    VERIFY_LABEL,
    Names,
    owner_of_label,
)
from accelplane.onload.resources import Node, Pod

_MAX_PROGRESS = 1024


class Progress(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The change of one node that is under way, as the annotation has it.

    `started` is when the change began, in seconds since the epoch. It is shown and never used for decisions. `upgrade`
    means that the node worked before, so that it counts as unavailable; `advertised` that it advertised the resource.
    `verified` is the label on which the node was last verified, and `user_image` its userland; both may be empty.
    """

    target: str
    started: int = 0
    upgrade: bool = False
    advertised: bool = False
    verified: str = ""
    user_image: str = ""


class VerifiedVersion(NamedTuple):
    """What a node was last verified on: the label of the version, and the image of the userland."""

    label: str
    user_image: str


class PodView(msgspec.Struct, frozen=True):
    """A pod of a node. `revision` is that of a plugin pod; None if it has none.

    `ready_since` is when the operator first observed that a plugin pod is ready, by its monotonic clock.
    """

    key: Request
    uid: str = ""
    is_terminating: bool = False
    is_ready: bool = False
    is_static: bool = False
    revision: str | None = None
    user_image: str = ""
    ready_since: float = 0.0


class BlockedEviction(NamedTuple):
    """A pod (`namespace/name`) whose eviction the API server rejected, with its message.

    `by_budget`: a PodDisruptionBudget does not allow it now. Otherwise it is rejected for another reason, for example
    because several budgets select the pod.
    """

    pod: str
    message: str = ""
    by_budget: bool = True


Probe = Literal["none", "running", "succeeded", "failed", "terminating"]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node as of a resource version. Labels are None if the node has no such label.

    `others` are other Onload resources that have labels or annotations there. `probe_since` is when the operator first
    observed that the probe pod failed, by its monotonic clock.
    """

    name: str
    version: str = ""
    selected: bool = True
    ready: bool = True
    kernel: str = ""
    held: bool = False
    cordoned: bool = False
    others: tuple[Names, ...] = ()
    advertised: bool = False
    module: str | None = None
    sfc: str | None = None
    gate: str | None = None
    module_loaded: bool = False
    module_loaded_version: str | None = None
    sfc_loaded: bool = False
    sfc_loaded_version: str | None = None
    module_pods: int = 0
    sfc_pods: int = 0
    failed_module_pods: tuple[str, ...] = ()
    plugins: tuple[PodView, ...] = ()
    apps: tuple[PodView, ...] = ()
    probe: Probe = "none"
    probe_since: float = 0.0
    progress: Progress | None = None

    @property
    def verified(self) -> VerifiedVersion | None:
        """What the node was last verified on. Before a change begins, that is what it has."""
        if self.progress is not None:
            found = VerifiedVersion(self.progress.verified, self.progress.user_image)
            return found if found.label else None
        if self.gate is None or self.module not in {None, self.gate}:
            return None
        return VerifiedVersion(self.gate, next((each.user_image for each in self.plugins), ""))

    @property
    def has_kmm_modules(self) -> bool:
        """Whether KMM reports a loaded module, or has a pod of one."""
        return self.module_loaded or self.sfc_loaded or bool(self.module_pods or self.sfc_pods)

    @property
    def must_be_released(self) -> bool:
        """Whether something of the resource has to be removed from a node that is not selected, and can be."""
        return not self.selected and self.ready and not self.is_clean

    @property
    def is_clean(self) -> bool:
        """Whether nothing of the resource is left on the node."""
        return all(each is None for each in (self.module, self.sfc, self.gate, self.progress))


def view(
    node: Node,
    names: Names,
    selector: Mapping[str, str] | None,
    pods: Sequence[Pod],
    *,
    since: Mapping[str, float] = MappingProxyType({}),
    resources: Collection[Names] = (),
) -> NodeView:
    """A node with its pods. Without a selector the node is not selected.

    `resources` are all Onload resources. `since` has, by the UID of pods, when plugin pods were first observed to be
    ready, and probe pods to have failed.
    """
    labels, annotations = node.labels, node.annotations
    here = [pod for pod in pods if not pod.is_finished]
    probe = _probe_pod(pods, names)
    return NodeView(
        name=node.metadata.name or "",
        version=node.metadata.resourceVersion or "",
        selected=selector is not None and selector.items() <= labels.items(),
        ready=node.is_ready,
        kernel=node.status.nodeInfo.kernelVersion,
        cordoned=node.spec.unschedulable,
        others=_others(names, (*labels, *annotations), resources),
        held=annotations.get(HOLD_ANNOTATION, "false") != "false",
        advertised=node.advertised not in {"", "0"},
        module=labels.get(names.module_label),
        sfc=labels.get(names.sfc_label),
        gate=labels.get(names.gate_label),
        module_loaded=names.ready_label(names.module) in labels,
        module_loaded_version=labels.get(names.version_ready_label(names.module)),
        sfc_loaded=names.ready_label(names.sfc_module) in labels,
        sfc_loaded_version=labels.get(names.version_ready_label(names.sfc_module)),
        module_pods=_module_pods(here, names, names.module),
        sfc_pods=_module_pods(here, names, names.sfc_module),
        plugins=tuple(
            _pod(pod, since)
            for pod in here
            if pod.labels.get(NAME_LABEL) == names.daemonset and pod.metadata.namespace == names.namespace
        ),
        failed_module_pods=tuple(
            pod.metadata.name or ""
            for pod in pods
            if pod.status.phase == "Failed"
            and pod.labels.get(KMM_POD_LABEL) in {names.module, names.sfc_module}
            and pod.metadata.namespace == names.namespace
        ),
        apps=tuple(_pod(pod, {}) for pod in here if pod.uses_onload and not is_probe(pod, names)),
        probe=_probe(probe),
        probe_since=since.get(probe.metadata.uid or "", 0.0) if probe is not None else 0.0,
        progress=parse_progress(annotations.get(names.progress_annotation)),
    )


def parse_progress(text: str | None) -> Progress | None:
    """The progress of a node. An annotation that cannot be parsed counts as progress that starts now."""
    if text is None:
        return None
    try:
        if len(text) <= _MAX_PROGRESS:
            return msgspec.json.decode(text, type=Progress)
    except msgspec.DecodeError:
        pass
    return Progress(target="", upgrade=True)


def format_progress(progress: Progress) -> str:
    """The value of the annotation."""
    return msgspec.json.encode(progress).decode()


def _others(names: Names, keys: Iterable[str], resources: Collection[Names]) -> tuple[Names, ...]:
    """Other resources by keys of labels and annotations. KMM's labels also belong to Modules of other programs."""
    found = {(key.startswith(f"{GROUP}/"), owner_of_label(key)) for key in keys}
    return tuple(
        sorted({each for ours, each in found if each is not None and each != names and (ours or each in resources)})
    )


def _module_pods(pods: Sequence[Pod], names: Names, module: str) -> int:
    return sum(pod.labels.get(KMM_POD_LABEL) == module and pod.metadata.namespace == names.namespace for pod in pods)


def is_probe(pod: Pod, names: Names) -> bool:
    """Whether a pod is a probe pod of a resource. Pods of others with the label use Onload as all others do."""
    owned = any(
        each.controller and each.kind == KIND and each.name == names.name for each in pod.metadata.ownerReferences or ()
    )
    return owned and pod.labels.get(VERIFY_LABEL) == names.daemonset and pod.metadata.namespace == names.namespace


def _probe_pod(pods: Sequence[Pod], names: Names) -> Pod | None:
    return next((pod for pod in pods if is_probe(pod, names)), None)


def _probe(found: Pod | None) -> Probe:
    if found is None:
        return "none"
    if found.metadata.deletionTimestamp is not None and found.status.phase != "Succeeded":
        return "terminating"
    match found.status.phase:
        case "Succeeded":
            return "succeeded"
        case "Failed":
            return "failed"
        case _:
            return "running"


def _pod(pod: Pod, since: Mapping[str, float]) -> PodView:
    return PodView(
        Request(pod.metadata.name or "", pod.metadata.namespace or ""),
        uid=pod.metadata.uid or "",
        is_terminating=pod.metadata.deletionTimestamp is not None,
        is_ready=pod.is_ready,
        is_static=pod.is_static,
        user_image=pod.user_image,
        revision=(pod.metadata.annotations or {}).get(REVISION_ANNOTATION),
        ready_since=since.get(pod.metadata.uid or "", 0.0),
    )
