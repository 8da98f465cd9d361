"""Writes of newer images into custom resources, for `image-upgrade=spec`.

Another program, such as a GitOps tool, may write the old image again. The new image runs nevertheless; it is written
less and less often, and the conflict is reported.
"""

import logging
from collections.abc import Sequence

import msgspec

from accelplane.apiserver import Conflict, StatusError
from accelplane.kube.client import Client
from accelplane.kube.customresource import CustomResource
from accelplane.kube.differences import Difference
from accelplane.kube.driftbackoff import DriftBackoff, FieldConflict
from accelplane.kube.events import Recorder
from accelplane.kube.objects import request_of
from accelplane.kube.writebudget import WriteBudget
from accelplane.operator import images
from accelplane.operator.models import DevicePlugin
from accelplane.operator.resources import read
from accelplane.operator.settings import ImagePolicy

log = logging.getLogger(__name__)


class Upgraded(msgspec.Struct, frozen=True):
    """A resource with the images to run, and those that differ from the images that the stored resource names.

    `error`: the stored resource could not be changed. `conflicts`: another program changes it back. `retry_after` are
    the seconds until it may be changed again, or until there is no conflict any more.
    """

    plugin: DevicePlugin
    replaced: Sequence[images.Replacement] = ()
    error: StatusError | None = None
    conflicts: Sequence[FieldConflict] = ()
    retry_after: float = 0.0


class SpecImages:
    """The images of the resources of one kind."""

    def __init__(self, client: Client, events: Recorder, policy: ImagePolicy, budget: WriteBudget) -> None:
        self._client = client
        self._events = events
        self._policy = policy
        self._backoff = DriftBackoff(budget=budget)

    async def upgraded(self, resource: CustomResource, plugin: DevicePlugin) -> Upgraded:
        """Replaces the images of a resource, and writes them into it if the policy says so. Raises `Conflict`."""
        upgraded, replaced = images.upgrade(plugin, self._policy)
        if self._policy.upgrade != "spec":
            return Upgraded(upgraded, replaced)
        key = request_of(resource)
        if not replaced:
            return Upgraded(plugin, (), None, self._backoff.conflicts(key), self._backoff.expiry(key))
        found = [Difference(("spec", each.field), found=each.found, expected=each.used) for each in replaced]
        desired = "; ".join(f"{each.field}={each.used}" for each in replaced)
        later, delay = self._backoff.postponed(key, desired, found)
        if later:
            return Upgraded(upgraded, replaced, None, self._backoff.conflicts(key), delay)
        change = {
            "metadata": {"resourceVersion": resource.metadata.resourceVersion},
            "spec": {each.field: each.used for each in replaced},
        }
        try:
            written = await self._client.patch(type(resource), plugin.name, change)
        except Conflict:
            raise
        except StatusError as error:
            # No reason for the pods to wait: it may be our own webhook that is away.
            log.warning("%s %s: images cannot be upgraded in it: %s", plugin.kind, plugin.name, error)
            return Upgraded(upgraded, replaced, error)
        self._backoff.record_write(key)
        self._backoff.record_correction(key, desired, found)
        for each in replaced:
            note = f"{each.field} {each.found} is upgraded to {each.used}"
            self._events.record(resource, "Normal", "ImageUpgraded", note)
        return Upgraded(read(written), (), None, self._backoff.conflicts(key), self._backoff.expiry(key))
