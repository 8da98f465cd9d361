"""The DaemonSets of the resources of one kind: which of them exist, and their writes.

A DaemonSet belongs to a resource by its controller reference. The cache has those with the label of the plugin in the
namespace of the operator; one whose label was removed, or of an operator in another namespace, is found by
`status.controlledDaemonSet`. Nothing is created or deleted without a live read.
"""

import logging
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from accelplane.apiserver import NotFound, StatusError
from accelplane.apiserver.errors import ApiError
from accelplane.kube.cache import Cache
from accelplane.kube.customresource import CustomResource
from accelplane.kube.driftbackoff import PRESENT, DriftBackoff, FieldConflict
from accelplane.kube.ensure import EnsureResult, delete_owned, ensure
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, request_of
from accelplane.kube.owners import owner_request
from accelplane.operator.models import DevicePlugin
from accelplane.operator.resources import DaemonSet
from accelplane.operator.settings import Settings
from accelplane.operator.update import GO_MANAGERS, HASH_ANNOTATION, Plan

log = logging.getLogger(__name__)

_OWNER = "owner"


class OtherNamespace(ApiError):
    """The DaemonSet of a resource is in another namespace than that of the operator."""


class Children:
    """Reads and writes the DaemonSets of resources of one kind, and reports changes."""

    def __init__(
        self, manager: Manager, kind: type[CustomResource], settings: Settings, daemonsets: Cache[DaemonSet]
    ) -> None:
        self._client = manager.client
        self._events = manager.events
        self._kind = kind
        self._namespace = settings.namespace
        self._daemonsets = daemonsets
        self.backoff = DriftBackoff()
        daemonsets.add_index(_OWNER, self._owner_name)

    def cached(self, request: Request) -> Sequence[DaemonSet]:
        """The DaemonSets of a resource in the cache, the oldest first."""
        return sorted(self._daemonsets.by_index(_OWNER, request.name), key=_age)

    async def existing(self, resource: CustomResource, plugin: DevicePlugin) -> Sequence[DaemonSet]:
        """The DaemonSets of a resource, the oldest first. Raises `OtherNamespace`."""
        found = self.cached(request_of(resource))
        recorded = plugin.status.controlled_daemon_set if plugin.status else None
        if recorded is None or not recorded.name or any(each.metadata.uid == recorded.uid for each in found):
            return found
        namespace = recorded.namespace or self._namespace
        name = f"DaemonSet {namespace}/{recorded.name}"
        try:
            live = await self._client.get(DaemonSet, recorded.name, namespace)
        except NotFound:
            return found
        except StatusError as error:
            if error.code != HTTPStatus.FORBIDDEN or namespace == self._namespace:
                raise
            raise OtherNamespace(
                name, f"cannot be read, expected no other DaemonSet of this resource; allow to get it: {error}"
            ) from error
        if owner_request(live, self._kind) != request_of(resource):
            return found
        if namespace != self._namespace:
            raise OtherNamespace(
                name,
                f"found a DaemonSet of this resource, expected one in namespace {self._namespace}; delete it, or set "
                f"DEVICEPLUGIN_NAMESPACE of the operator to {namespace}",
            )
        return sorted([*found, live], key=_age)

    async def ensure(
        self, resource: CustomResource, planned: Plan, current: DaemonSet | None
    ) -> EnsureResult[DaemonSet]:
        """Writes the DaemonSet, and reports the changes. Raises `NameConflict`."""
        child = msgspec.convert(planned.child.as_object(), DaemonSet)
        key = request_of(child)
        known_conflicts = len(self.conflicts(key))
        ensured = await ensure(
            self._client,
            child,
            resource,
            existing=current,
            former_managers=GO_MANAGERS,
            hash_annotation=HASH_ANNOTATION,
            backoff=self.backoff,
        )
        changes = "; ".join(map(str, ensured.differences))
        name = f"DaemonSet {key.namespace}/{key.name}"
        match ensured.action:
            case "created":
                self._report(resource, "Created", f"{name} created")
            case "adopted":
                self._report(resource, "Adopted", f"{name} of a former resource of this name adopted")
            case "updated":
                self._report(resource, "Updated", f"{name} updated: {changes}")
            case _:
                pass
        conflicts = self.conflicts(key)
        if len(conflicts) > known_conflicts:
            note = f"{name}: {'; '.join(map(str, conflicts))}"
            self._events.record(resource, "Warning", conflicts[-1].reason, note)
        return ensured

    async def delete_surplus(self, resource: CustomResource, surplus: Sequence[DaemonSet]) -> float:
        """Deletes duplicates. Returns the seconds until the next attempt if another program creates them again."""
        delay = 0.0
        for each in surplus:
            deleted, wait = await self._delete(each, request_of(resource))
            delay = max(delay, wait)
            if deleted:
                self._report(resource, "Deleted", f"Deleted duplicate DaemonSet {request_of(each)}")
        return delay

    async def delete_all(self, owner: Request, existing: Sequence[DaemonSet]) -> float:
        """Deletes the DaemonSets of a deleted resource. Returns the seconds until the next attempt, as above."""
        if not existing:
            return 0.0
        try:
            await self._client.get(self._kind, owner.name)
        except NotFound:
            log.info("%s %s was deleted: deleting its DaemonSets", self._kind.__name__, owner)
        else:
            return 0.0  # The cache is outdated.
        return max([(await self._delete(each, owner))[1] for each in existing])

    def conflicts(self, key: Request) -> Sequence[FieldConflict]:
        """Fields of a DaemonSet that another program changes again and again, or its repeated deletion."""
        return self.backoff.conflicts(key)

    async def _delete(self, daemonset: DaemonSet, owner: Request) -> tuple[bool, float]:
        """Whether it was deleted, and the seconds until it may be."""
        key = request_of(daemonset)
        if daemonset.metadata.deletionTimestamp:
            return False, 0.0
        if (delay := self.backoff.delay(key, owner.name, PRESENT)) > 0:
            return False, delay
        deleted = await delete_owned(self._client, daemonset, self._kind, owner)
        if deleted:
            self.backoff.record_write(key)
            self.backoff.record_correction(key, owner.name, [PRESENT])
        return deleted, 0.0

    def _report(self, resource: CustomResource, reason: str, note: str) -> None:
        log.info("%s %s: %s", self._kind.__name__, resource.metadata.name, note)
        self._events.record(resource, "Normal", reason, note)

    def _owner_name(self, daemonset: DaemonSet) -> Sequence[str]:
        owner = owner_request(daemonset, self._kind)
        return [owner.name] if owner else []


def _age(daemonset: DaemonSet) -> tuple[str, str]:
    return daemonset.metadata.creationTimestamp or "", daemonset.metadata.name or ""
