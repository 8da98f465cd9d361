"""The types of the API that the controller runtime itself reads and writes.

Facts: Kubernetes API reference (coordination.k8s.io/v1 Lease, events.k8s.io/v1 Event).
"""

from datetime import datetime
from typing import ClassVar

import msgspec

from .objects import ApiInfo, Metadata, NamespacedResource, api


class LeaseSpec(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The holder of a lease and its times."""

    holderIdentity: str | None = None
    leaseDurationSeconds: int | None = None
    acquireTime: datetime | None = None
    renewTime: datetime | None = None
    leaseTransitions: int | None = None
    strategy: str | None = None
    preferredHolder: str | None = None


class Lease(NamespacedResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    """A lease, for leader election."""

    _api_info: ClassVar[ApiInfo] = api("coordination.k8s.io", "v1", "Lease", "leases")
    metadata: Metadata
    spec: LeaseSpec | None = None


class ObjectReference(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The object that an event is about."""

    apiVersion: str | None = None
    kind: str | None = None
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resourceVersion: str | None = None
    fieldPath: str | None = None


class EventSeries(msgspec.Struct, kw_only=True):
    """How often an event has occurred, and when last."""

    count: int
    lastObservedTime: datetime


class Event(NamespacedResource, msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event."""

    _api_info: ClassVar[ApiInfo] = api("events.k8s.io", "v1", "Event", "events")
    metadata: Metadata
    eventTime: datetime | None = None  # null in events that were created by the core API
    action: str | None = None
    reason: str | None = None
    note: str | None = None
    type: str | None = None
    regarding: ObjectReference | None = None
    related: ObjectReference | None = None
    reportingController: str | None = None
    reportingInstance: str | None = None
    series: EventSeries | None = None
