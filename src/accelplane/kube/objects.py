"""API objects as msgspec Structs. Each class has the group, version and plural of its kind.

A Struct declares only the fields that a program uses; other fields are neither decoded nor stored. The classes of
lightkube (`lightkube.resources`) are accepted too, and are recognized without importing them.

    class PodPlace(NamespacedResource, msgspec.Struct):
        metadata: Metadata
        spec: PodPlaceSpec
        _api_info: ClassVar[ApiInfo] = api("", "v1", "Pod", "pods")
"""

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec


class ResourceDef(NamedTuple):
    """Group, version and kind; the core group is empty."""

    group: str
    version: str
    kind: str


class ApiInfo(msgspec.Struct, frozen=True):
    """Group, version, kind and plural. Subresources with another kind (`pods/eviction`) have `parent` and `action`."""

    resource: ResourceDef
    plural: str
    parent: ResourceDef | None = None
    action: str | None = None


class GlobalResource:
    """A kind that is cluster-scoped."""

    _api_info: ClassVar[ApiInfo]


class NamespacedResource:
    """A kind whose objects have a namespace."""

    _api_info: ClassVar[ApiInfo]


class IsOwnerReference(Protocol):
    """The fields of owner references that this package reads."""

    @property
    def apiVersion(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def controller(self) -> bool | None: ...


class OwnerReference(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A reference to an owner, by which the garbage collector finds what to delete with it."""

    apiVersion: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    blockOwnerDeletion: bool | None = None


# The base classes of namespaced kinds, here and in lightkube.
_NAMESPACED = ("NamespacedResource", "NamespacedSubResource")


class HasIdentity(Protocol):
    """The metadata that this package reads; `Metadata` and lightkube's `ObjectMeta` have it."""

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
    def ownerReferences(self) -> Sequence[IsOwnerReference] | None: ...


@runtime_checkable
class HasManagedFields(Protocol):
    """Metadata with the fields that managers own."""

    managedFields: Sequence[object] | None


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
    """The least metadata that a cache needs, for kinds with thousands of objects."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resourceVersion: str | None = None
    ownerReferences: Sequence[OwnerReference] | None = None


class Request(NamedTuple):
    """The key of an object in caches and queues. The namespace is empty for cluster-scoped kinds."""

    name: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def api(
    group: str, version: str, kind: str, plural: str, *, parent: ResourceDef | None = None, action: str | None = None
) -> ApiInfo:
    """The value for `_api_info` of a class."""
    return ApiInfo(ResourceDef(group, version, kind), plural, parent, action)


def api_of(kind: type[Object]) -> ApiInfo:
    """The API information of a kind. Raises `TypeError` for other classes."""
    info: ApiInfo | None = getattr(kind, "_api_info", None)
    if info is None:
        raise TypeError(f"{kind.__name__}: expected a kind, a class with _api_info")
    return info


def is_namespaced(kind: type[Object]) -> bool:
    return any(base.__name__ in _NAMESPACED for base in kind.__mro__)


def metadata_only(kind: type[Object]) -> bool:
    """Returns whether `metadata` is the only field of a kind, so that the server can omit the others."""
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
    """An object as JSON for the API, with the apiVersion and kind of its class."""
    resource = api_of(type(thing)).resource
    fields: dict[str, object] = msgspec.to_builtins(thing)
    group = f"{resource.group}/" if resource.group else ""
    return {**fields, "apiVersion": f"{group}{resource.version}", "kind": resource.kind}


def trim(thing: Object) -> None:
    """Removes the managed fields, which can be the largest part of an object."""
    if isinstance(thing.metadata, HasManagedFields):
        thing.metadata.managedFields = None


def untrimmed(_thing: Object) -> None:
    """A transform that keeps everything: for a cache whose objects `ensure` corrects without reading them again."""


def is_terminating(thing: Object) -> bool:
    """Whether the object is being deleted."""
    return getattr(thing.metadata, "deletionTimestamp", None) is not None


def micro_time(moment: datetime) -> datetime:
    """A time as the API's MicroTime must be written: with its microseconds, which an encoder leaves out when 0."""
    return moment.replace(microsecond=max(1, moment.microsecond))
