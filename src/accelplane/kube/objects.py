"""What an object of the API is to this package: a msgspec Struct that knows where the API keeps its kind.

lightkube's classes (`lightkube.resources`) are such kinds, whole. A kind of one's own, or part of a known one, is a
Struct with the fields that matter; what it does not name is neither decoded nor kept:

    class PodPlace(NamespacedResourceG, msgspec.Struct):
        metadata: Metadata
        spec: PodPlaceSpec
        _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec
from lightkube.core.resource import ApiInfo, NamespacedResource, NamespacedSubResource, Resource, ResourceDef, api_info
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference


class HasIdentity(Protocol):
    """The metadata that this package reads; lightkube's `ObjectMeta` and `Metadata` have it."""

    @property
    def name(self) -> str | None: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def uid(self) -> str | None: ...
    @property
    def resourceVersion(self) -> str | None: ...
    @property
    def generation(self) -> int | None: ...
    @property
    def ownerReferences(self) -> Sequence[OwnerReference] | None: ...


class Object(Protocol):
    """An object of a kind that can be got, listed and watched."""

    @property
    def metadata(self) -> HasIdentity | None: ...


class Metadata(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An object's metadata. Caches remove the managed fields, which are large, unless their transform keeps them."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resourceVersion: str | None = None
    generation: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    ownerReferences: list[OwnerReference] | None = None
    finalizers: list[str] | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None
    managedFields: list[dict[str, object]] | None = None


class Identity(msgspec.Struct, kw_only=True, gc=False):
    """The metadata of what there are thousands of: as little as a cache needs."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resourceVersion: str | None = None
    ownerReferences: Sequence[OwnerReference] | None = None


class Request(NamedTuple):
    """Which object to look at: the key of caches and queues. The namespace is empty for kinds that have none."""

    name: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def api(group: str, version: str, kind: str, plural: str) -> ApiInfo:
    """Where the API keeps a kind, for the `_api_info` of its class."""
    return ApiInfo(resource=ResourceDef(group, version, kind), plural=plural, verbs=[])


def api_of(kind: type[Object]) -> ApiInfo:
    """Where the API keeps this kind."""
    return api_info(_resource(kind))


def is_namespaced(kind: type[Object]) -> bool:
    return issubclass(_resource(kind), (NamespacedResource, NamespacedSubResource))


def metadata_only(kind: type[Object]) -> bool:
    """Returns whether a kind has no other field than `metadata`, so that the server need not send more."""
    return issubclass(kind, msgspec.Struct) and kind.__struct_fields__ == ("metadata",)


def metadata_of(thing: Object) -> HasIdentity:
    """An object's metadata, which every object from the API has. Raises `ValueError` for one without a name."""
    if thing.metadata is None or not thing.metadata.name:
        raise ValueError(f"{type(thing).__name__}: has no metadata.name")
    return thing.metadata


def request_of(thing: Object) -> Request:
    """The key of an object."""
    metadata = metadata_of(thing)
    return Request(metadata.name or "", metadata.namespace or "")


def document_of(thing: Object) -> dict[str, object]:
    """An object as the API takes it, with its apiVersion and kind whatever the object itself says."""
    resource = api_of(type(thing)).resource
    fields: dict[str, object] = msgspec.to_builtins(thing)
    group = f"{resource.group}/" if resource.group else ""
    return {**fields, "apiVersion": f"{group}{resource.version}", "kind": resource.kind}


def trim(thing: Object) -> None:
    """Takes from an object what no controller reads and what can be the greater part of it."""
    if isinstance(thing.metadata, ObjectMeta | Metadata):
        thing.metadata.managedFields = None


def untrimmed(_thing: Object) -> None:
    """A transform that keeps everything: for a cache whose objects `ensure` corrects without reading them again."""


def is_terminating(thing: Object) -> bool:
    """Whether the object is being deleted."""
    return isinstance(thing.metadata, ObjectMeta | Metadata) and thing.metadata.deletionTimestamp is not None


def micro_time(moment: datetime) -> datetime:
    """A time as the API's MicroTime must be written: with its microseconds, which an encoder leaves out when 0."""
    return moment.replace(microsecond=max(1, moment.microsecond))


def _resource(kind: type[Object]) -> type[Resource]:
    if not issubclass(kind, Resource):
        raise TypeError(f"{kind.__name__}: a kind is a class of lightkube.core.resource.Resource")
    return kind
