"""Selects the DaemonSet of a custom resource among existing ones, and plans its update.

    plan(desired, existing) -> Plan             the DaemonSet to ensure, and surplus ones
    provisioning_on(daemonset) -> str           the hash of the ConfigMap that its pods have

A DaemonSet belongs to a resource by its controller reference and not by its name: one of an older operator keeps its
name and its selector. `kube.ensure` writes it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from accelplane.kube.jsontypes import JsonObject
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION, DaemonSet
from accelplane.operator.daemonsets.objects import Selector
from accelplane.operator.models import GROUP

HASH_ANNOTATION = f"{GROUP}/template-hash"
# The field manager of Go's operators: the name of their program.
GO_MANAGERS = ("intel_deviceplugin_operator",)


class Plan(msgspec.Struct, frozen=True):
    """`child` is the DaemonSet to ensure, `surplus` are the names of others to delete."""

    child: DaemonSet
    surplus: tuple[str, ...] = ()


class _Owner(msgspec.Struct):
    uid: str = ""
    controller: bool = False


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    owner_references: list[_Owner] = []


class _PodMetadata(msgspec.Struct):
    annotations: dict[str, str] = {}


class _PodSpec(msgspec.Struct, rename="camel"):
    service_account_name: str = ""


class _Template(msgspec.Struct):
    metadata: _PodMetadata = msgspec.field(default_factory=_PodMetadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class _Spec(msgspec.Struct):
    selector: _Selector = msgspec.field(default_factory=_Selector)
    template: _Template = msgspec.field(default_factory=_Template)


class _View(msgspec.Struct):
    """The fields of an existing DaemonSet on which the plan depends."""

    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


def plan(desired: DaemonSet, existing: Sequence[JsonObject]) -> Plan:
    """The plan. `existing` are all DaemonSets whose controller reference names the resource, whatever its UID.

    The oldest DaemonSet that the resource controls is used. If it controls none, the oldest of a former resource of the
    same name is adopted. DaemonSets that are being deleted are ignored.
    """
    owners = {owner.uid for owner in desired.metadata.owner_references}
    candidates = [view for view in map(_view, existing) if not view.metadata.deletion_timestamp]
    candidates.sort(key=lambda view: (not _is_controlled(view, owners), *_age(view)))
    if not candidates:
        return Plan(desired)
    view, *others = candidates
    return Plan(_adapted(desired, view), tuple(other.metadata.name for other in others))


def provisioning_on(daemonset: JsonObject) -> str:
    """The hash of the ConfigMap that the pods were created with, empty for none.

    It is kept while the ConfigMap cannot be read: running pods are not replaced by pods that wait for it.
    """
    return _view(daemonset).spec.template.metadata.annotations.get(PROVISIONING_ANNOTATION, "")


def _view(daemonset: JsonObject) -> _View:
    return msgspec.convert(daemonset, _View)


def _is_controlled(view: _View, owners: set[str]) -> bool:
    return any(owner.uid in owners for owner in view.metadata.owner_references if owner.controller)


def _age(view: _View) -> tuple[str, str]:
    return view.metadata.creation_timestamp, view.metadata.name


def _adapted(desired: DaemonSet, view: _View) -> DaemonSet:
    """The DaemonSet with the name and the selector of the existing one, which are immutable."""
    labels: Mapping[str, str] = view.spec.selector.match_labels or desired.spec.selector.match_labels
    template = desired.spec.template
    pod = template.spec
    if not pod.service_account_name and view.spec.template.spec.service_account_name:
        # The API server sets serviceAccount from serviceAccountName and vice versa, so neither can be removed.
        pod = msgspec.structs.replace(pod, service_account_name="default")
    metadata = msgspec.structs.replace(template.metadata, labels={**template.metadata.labels, **labels})
    spec = msgspec.structs.replace(
        desired.spec,
        selector=Selector(match_labels=labels),
        template=msgspec.structs.replace(template, metadata=metadata, spec=pod),
    )
    namespace = view.metadata.namespace or desired.metadata.namespace
    return msgspec.structs.replace(
        desired,
        metadata=msgspec.structs.replace(desired.metadata, name=view.metadata.name, namespace=namespace),
        spec=spec,
    )
