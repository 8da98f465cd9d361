"""The kinds of the API that the operator uses, with the fields that it reads.

Custom resources are cached undecoded (`kube.customresource`) and decoded by `read`: the status of a resource that does
not fit its type has the reason.
"""

import functools
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import astuple

from accelplane.kube.customresource import CustomResource, custom_resource
from accelplane.kube.interning import StringPool
from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.kinds import NO_STATUS, NodeLabels, Pod, placement
from accelplane.kube.objects import (
    GlobalResource,
    Identity,
    Metadata,
    NamespacedResource,
    OwnerReference,
    api,
)
from accelplane.operator import models

_intern = StringPool()


def read(resource: CustomResource) -> models.DevicePlugin:
    """The resource as its type. Raises `msgspec.ValidationError`."""
    return models.decode(resource.document())


def read_without_spec(resource: CustomResource) -> models.DevicePlugin:
    """The resource without its spec, and without its status if that does not fit its type."""
    found = {name: part for name, part in resource.document().items() if name != "spec"}
    try:
        return models.decode(found)
    except msgspec.ValidationError:
        return models.decode({name: part for name, part in found.items() if name != "status"})


def provisioning_config(resource: CustomResource) -> str:
    """The name of the ConfigMap in the spec, whatever else the spec contains."""
    try:
        return msgspec.json.decode(resource.spec, type=_Provisioned).name
    except msgspec.DecodeError:
        return ""


class _Provisioned(msgspec.Struct):
    name: str = msgspec.field(name="provisioningConfig", default="")


KINDS: Mapping[str, type[CustomResource]] = {
    family: custom_resource(models.GROUP, models.VERSION, model.__name__) for family, model in models.KINDS.items()
}


class DaemonSet(NamespacedResource, msgspec.Struct, kw_only=True, omit_defaults=True):
    """A DaemonSet with its complete spec, for comparison with the desired one."""

    metadata: Metadata
    spec: dict[str, object] = {}
    status: dict[str, object] = {}
    _api_info = api("apps", "v1", "DaemonSet", "daemonsets")

    def document(self) -> JsonObject:
        """The DaemonSet as a JSON object."""
        fields: JsonObject = msgspec.to_builtins(self)
        return {"apiVersion": "apps/v1", "kind": "DaemonSet", **fields}


class NamedDaemonSet(NamespacedResource, msgspec.Struct, kw_only=True):
    """The name and the owners of a DaemonSet."""

    metadata: Identity
    _api_info = api("apps", "v1", "DaemonSet", "daemonsets")


class ConfigMap(NamespacedResource, msgspec.Struct, kw_only=True):
    """A ConfigMap's content."""

    metadata: Metadata
    data: dict[str, str] | None = None
    binaryData: dict[str, str] | None = None
    _api_info = api("", "v1", "ConfigMap", "configmaps")


class ServiceAccount(NamespacedResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    _api_info = api("", "v1", "ServiceAccount", "serviceaccounts")


class RoleReference(msgspec.Struct):
    name: str
    kind: str = "ClusterRole"
    apiGroup: str = "rbac.authorization.k8s.io"


class Subject(msgspec.Struct):
    name: str
    namespace: str = ""
    kind: str = "ServiceAccount"


class ClusterRoleBinding(GlobalResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    roleRef: RoleReference
    subjects: list[Subject] | None = None
    _api_info = api("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings")


class PolicyRule(msgspec.Struct, frozen=True, omit_defaults=True):
    apiGroups: Sequence[str] = ()
    resources: Sequence[str] = ()
    resourceNames: Sequence[str] = ()
    verbs: Sequence[str] = ()


class ClusterRole(GlobalResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    rules: list[PolicyRule] | None = None
    _api_info = api("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles")


def place_only(thing: Pod) -> None:
    """A transform: keeps the owner and the node of a pod, as values that pods share."""
    metadata = thing.metadata
    metadata.uid = metadata.labels = metadata.annotations = metadata.creationTimestamp = None
    metadata.namespace = _intern(metadata.namespace or "")
    if metadata.ownerReferences:
        metadata.ownerReferences = _shared(tuple(astuple(each) for each in metadata.ownerReferences))
    thing.spec, thing.status = placement(thing.spec.nodeName), NO_STATUS


@functools.lru_cache(maxsize=64)
def _shared(owners: tuple[tuple[str | bool | None, ...], ...]) -> Sequence[OwnerReference]:
    names = OwnerReference.__struct_fields__
    return [msgspec.convert(dict(zip(names, owner, strict=True)), OwnerReference) for owner in owners]


def labels_only(thing: NodeLabels) -> None:
    """A transform: keeps the labels of a node, as values that nodes share."""
    metadata = thing.metadata
    labels, metadata.annotations, metadata.creationTimestamp = metadata.labels or {}, None, None
    metadata.labels = {_intern(name): _intern(value) for name, value in labels.items()}
