"""The kinds of the API that the Onload operator uses, with the fields that it reads.

Nodes and pods are projections: a cache stores only the fields that decisions depend on, as values that objects share.
"""

import functools
from typing import ClassVar

import msgspec

from accelplane.kube import kinds
from accelplane.kube.customresource import CustomResource, custom_resource
from accelplane.kube.interning import StringPool
from accelplane.kube.kinds import Condition, NodeInfo, NodeStatus, PodStatus, is_true, placement, pod_requests
from accelplane.kube.objects import (
    ApiInfo,
    GlobalResource,
    Identity,
    Metadata,
    NamespacedResource,
    OwnerReference,
    ResourceDef,
    api,
)
from accelplane.onload import models
from accelplane.onload.names import (
    GROUP,
    KMM_GROUP,
    KMM_POD_LABEL,
    KMM_VERSION,
    MIRROR_ANNOTATION,
    NAME_LABEL,
    RESOURCE,
    REVISION_ANNOTATION,
    VERIFY_LABEL,
    VERSION,
)

_intern = StringPool()

ONLOAD: type[CustomResource] = custom_resource(GROUP, VERSION, models.KIND, namespaced=True)


def read(resource: CustomResource) -> models.Onload:
    """The resource as its type, without a status that does not fit. Raises `msgspec.ValidationError`."""
    document = resource.document()
    try:
        return msgspec.convert(document, models.Onload)
    except msgspec.ValidationError:
        return msgspec.convert({**document, "status": None}, models.Onload)


class _Written(NamespacedResource, msgspec.Struct, kw_only=True, omit_defaults=True):
    """An object with its complete spec, for comparison with the desired one."""

    metadata: Metadata
    spec: dict[str, object] = {}


class Module(_Written):
    """A Module of KMM."""

    _api_info: ClassVar[ApiInfo] = api(KMM_GROUP, KMM_VERSION, "Module", "modules")


class DaemonSetStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    desired_number_scheduled: int = 0
    number_ready: int = 0


class DaemonSet(_Written):
    _api_info: ClassVar[ApiInfo] = api("apps", "v1", "DaemonSet", "daemonsets")
    status: DaemonSetStatus = msgspec.field(default_factory=DaemonSetStatus)


# Nodes


class Node(kinds.Node, kw_only=True):
    """A node. `node_only` keeps the condition Ready and the amount of `amd.com/onload` of its status."""

    @property
    def advertised(self) -> str:
        """The allocatable amount of `amd.com/onload`."""
        return str((self.status.allocatable or {}).get(RESOURCE, ""))


def node_only(thing: Node) -> None:
    """A transform: keeps labels, our annotations, readiness and the amount of the resource."""
    thing.metadata.labels = {_intern(name): _intern(value) for name, value in thing.labels.items()}
    thing.metadata.annotations = {
        _intern(name): value for name, value in thing.annotations.items() if name.startswith(f"{GROUP}/")
    }
    amount = thing.advertised
    thing.status = _node_status(thing.is_ready, _intern(thing.status.nodeInfo.kernelVersion), amount)


@functools.lru_cache(maxsize=1024)
def _node_status(ready: bool, kernel: str, amount: str) -> NodeStatus:
    return NodeStatus(
        allocatable={RESOURCE: amount} if amount else None,
        conditions=[Condition("Ready", "True" if ready else "False")],
        nodeInfo=NodeInfo(kernel),
    )


def relevant(node: Node) -> tuple[object, ...]:
    """The fields of a node whose change causes a reconciliation. A heartbeat changes none of them."""
    return (
        node.labels,
        node.annotations,
        node.status.nodeInfo.kernelVersion,
        node.is_ready,
        node.spec.unschedulable,
        node.advertised,
    )


# Pods


class Pod(kinds.Pod, kw_only=True):
    """A pod. `pod_only` replaces its containers by `uses_onload`, and keeps of its labels those that are read.

    `user_image` is the image of the Onload userland of a plugin pod. A static pod is one that the kubelet creates.
    """

    uses_onload: bool = msgspec.field(default=False, name="-")
    is_ready: bool = msgspec.field(default=False, name="--")
    user_image: str = msgspec.field(default="", name="---")
    is_static: bool = msgspec.field(default=False, name="----")


_POD_LABELS = (KMM_POD_LABEL, NAME_LABEL, VERIFY_LABEL)


def pod_only(thing: Pod) -> None:
    """A transform that keeps the fields that decisions depend on."""
    spec, metadata = thing.spec, thing.metadata
    thing.uses_onload = bool(pod_requests(spec, RESOURCE.__eq__))
    thing.is_ready = is_true("Ready", thing.status.conditions)
    if NAME_LABEL in thing.labels and spec.initContainers:
        thing.user_image = _intern(spec.initContainers[0].image)
    thing.spec, thing.status = placement(spec.nodeName), _status(thing.status.phase)
    metadata.namespace, metadata.creationTimestamp = _intern(metadata.namespace or ""), None
    labels = {_intern(key): _intern(value) for key, value in thing.labels.items() if key in _POD_LABELS}
    metadata.labels = labels or None
    thing.is_static = MIRROR_ANNOTATION in (metadata.annotations or {})
    revision = (metadata.annotations or {}).get(REVISION_ANNOTATION)
    metadata.annotations = {REVISION_ANNOTATION: _intern(revision)} if revision else None
    if not labels and not thing.uses_onload:
        metadata.ownerReferences = metadata.uid = None


@functools.lru_cache(maxsize=16)
def _status(phase: str) -> PodStatus:
    return PodStatus(phase=phase)


def concerns_onload(pod: Pod) -> bool:
    """Whether a pod uses Onload, is a pod of the device plugin or of KMM, or verifies a node."""
    return pod.uses_onload or bool(pod.metadata.labels)


def pod_state(pod: Pod) -> tuple[object, ...]:
    """The fields of a pod whose change causes a reconciliation."""
    return pod.spec.nodeName, pod.status.phase, pod.is_ready, pod.metadata.deletionTimestamp, pod.metadata.labels


class Eviction(NamespacedResource, msgspec.Struct, kw_only=True):
    """An eviction. The API server answers with a Status, which has no metadata."""

    metadata: Metadata | None = None
    deleteOptions: dict[str, object] | None = None
    _api_info: ClassVar[ApiInfo] = api(
        "policy", "v1", "Eviction", "pods", parent=ResourceDef("", "v1", "Pod"), action="eviction"
    )


class ProbePod(NamespacedResource, msgspec.Struct, kw_only=True, omit_defaults=True):
    """A pod as it is created."""

    metadata: Metadata
    spec: dict[str, object]
    _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")


# The definition of KMM's Module


class _Schema(msgspec.Struct):
    properties: dict[str, "_Schema"] = {}


class _Validation(msgspec.Struct):
    openAPIV3Schema: _Schema = msgspec.field(default_factory=_Schema)


class _Version(msgspec.Struct):
    name: str = ""
    served: bool = False
    schema: _Validation = msgspec.field(default_factory=_Validation)


class _DefinitionSpec(msgspec.Struct):
    versions: list[_Version] = []


class Definition(GlobalResource, msgspec.Struct, kw_only=True):
    """A CustomResourceDefinition with the names of its fields."""

    metadata: Identity
    spec: _DefinitionSpec = msgspec.field(default_factory=_DefinitionSpec)
    _api_info: ClassVar[ApiInfo] = api(
        "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"
    )

    def has_field(self, version: str, *path: str) -> bool:
        """Whether a served version has a field."""
        schema = next((each.schema.openAPIV3Schema for each in self.spec.versions if each.name == version), None)
        for name in path:
            schema = schema.properties.get(name) if schema is not None else None
        return schema is not None


def owner_of(resource: CustomResource) -> OwnerReference:
    """The controller reference to a resource."""
    metadata = resource.metadata
    return OwnerReference(
        apiVersion=f"{GROUP}/{VERSION}",
        kind=models.KIND,
        name=metadata.name or "",
        uid=metadata.uid or "",
        controller=True,
        blockOwnerDeletion=True,
    )
