"""The kinds of the API that the operator asks for, with the fields that it looks at and no others.

A custom resource is kept as it came and is read (`CustomResource.read`) where it is judged: one that does not fit its
type is told so in its status instead of being passed over.
"""

import functools
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import astuple

from accelplane.kube.interning import StringPool
from accelplane.kube.jsontypes import JsonObject
from accelplane.kube.objects import (
    GlobalResource,
    Identity,
    Metadata,
    NamespacedResource,
    OwnerReference,
    api,
    document_of,
    trim,
)
from accelplane.operator import models

_EMPTY = msgspec.Raw(b"null")
_intern = StringPool()


class CustomResource(GlobalResource, msgspec.Struct, kw_only=True):
    """A custom resource of any kind."""

    metadata: Metadata
    spec: msgspec.Raw = _EMPTY
    status: msgspec.Raw = _EMPTY

    def document(self) -> JsonObject:
        """The resource as an object."""
        kind = type(self).__name__
        return {
            "apiVersion": f"{models.GROUP}/{models.VERSION}",
            "kind": kind,
            "metadata": msgspec.to_builtins(self.metadata),
            **{name: msgspec.json.decode(raw) for name, raw in self._parts().items()},
        }

    def read(self) -> models.DevicePlugin:
        """The resource by its type. Raises `msgspec.ValidationError`."""
        return models.decode(self.document())

    def bare(self) -> models.DevicePlugin:
        """The resource without its spec, and without a status that does not fit its type."""
        found = {name: part for name, part in self.document().items() if name != "spec"}
        try:
            return models.decode(found)
        except msgspec.ValidationError:
            return models.decode({name: part for name, part in found.items() if name != "status"})

    def provisioning_config(self) -> str:
        """The ConfigMap that the spec names, whatever else is in it."""
        try:
            return msgspec.json.decode(self.spec, type=_Provisioned).name
        except msgspec.DecodeError:
            return ""

    def _parts(self) -> Mapping[str, msgspec.Raw]:
        parts = {"spec": self.spec, "status": self.status}
        return {name: raw for name, raw in parts.items() if bytes(raw) != b"null"}


class _Provisioned(msgspec.Struct):
    name: str = msgspec.field(name="provisioningConfig", default="")


def _resource(model: type[models.DevicePlugin]) -> type[CustomResource]:
    kind = model.__name__
    return type(kind, (CustomResource,), {"_api_info": api(models.GROUP, models.VERSION, kind, f"{kind.lower()}s")})


KINDS: Mapping[str, type[CustomResource]] = {family: _resource(model) for family, model in models.KINDS.items()}


class ManagedMetadata(Metadata):
    """With the managed fields, which decide how a DaemonSet of an older operator is taken over."""

    managedFields: list[dict[str, object]] | None = None


class DaemonSet(NamespacedResource, msgspec.Struct, kw_only=True, omit_defaults=True):
    """A DaemonSet, whole: what is asked for is compared with all of it."""

    metadata: ManagedMetadata
    spec: dict[str, object] = {}
    status: dict[str, object] = {}
    _api_info = api("apps", "v1", "DaemonSet", "daemonsets")

    def document(self) -> JsonObject:
        """The DaemonSet as an object."""
        return msgspec.json.decode(msgspec.json.encode(document_of(self)))


class PodPlace(msgspec.Struct, gc=False):
    """Where a pod is."""

    nodeName: str = ""


class Pod(NamespacedResource, msgspec.Struct, kw_only=True):
    """A pod: whose it is, and where."""

    metadata: Identity
    spec: PodPlace = msgspec.field(default_factory=PodPlace)
    _api_info = api("", "v1", "Pod", "pods")


class ConfigMap(NamespacedResource, msgspec.Struct, kw_only=True):
    """A ConfigMap's content."""

    metadata: Metadata
    data: dict[str, str] | None = None
    binaryData: dict[str, str] | None = None
    _api_info = api("", "v1", "ConfigMap", "configmaps")


class LabelledIdentity(Identity, kw_only=True, gc=False):
    """The same with labels."""

    labels: dict[str, str] | None = None


class Node(GlobalResource, msgspec.Struct, kw_only=True):
    """A node's labels."""

    metadata: LabelledIdentity
    _api_info = api("", "v1", "Node", "nodes")


class ServiceAccount(NamespacedResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    _api_info = api("", "v1", "ServiceAccount", "serviceaccounts")


class RoleReference(msgspec.Struct):
    name: str
    kind: str = "ClusterRole"
    apiGroup: str = "rbac.authorization.k8s.io"


class Subject(msgspec.Struct):
    name: str
    namespace: str
    kind: str = "ServiceAccount"


class ClusterRoleBinding(GlobalResource, msgspec.Struct, kw_only=True):
    metadata: Metadata
    roleRef: RoleReference
    subjects: list[Subject]
    _api_info = api("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings")


def own(thing: CustomResource) -> None:
    """Lets go of the page that the resource came in."""
    trim(thing)
    thing.spec, thing.status = thing.spec.copy(), thing.status.copy()


def place_only(thing: Pod) -> None:
    """Keeps of a pod whose it is, which all pods of a DaemonSet share, and where, which is what other pods say too."""
    metadata = thing.metadata
    metadata.uid = None
    metadata.namespace = _intern(metadata.namespace or "")
    if metadata.ownerReferences:
        metadata.ownerReferences = _shared(tuple(astuple(each) for each in metadata.ownerReferences))
    thing.spec.nodeName = _intern(thing.spec.nodeName)


@functools.lru_cache(maxsize=64)
def _shared(owners: tuple[tuple[str | bool | None, ...], ...]) -> Sequence[OwnerReference]:
    names = OwnerReference.__struct_fields__
    return [msgspec.convert(dict(zip(names, owner, strict=True)), OwnerReference) for owner in owners]


def labels_only(thing: Node) -> None:
    """Keeps of a node its labels, which are much the same on all nodes."""
    labels = thing.metadata.labels or {}
    thing.metadata.labels = {_intern(name): _intern(value) for name, value in labels.items()}
