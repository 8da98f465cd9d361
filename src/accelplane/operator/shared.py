"""Objects that all GPU custom resources share: the service account of the resource manager, and its role binding.

They exist while a resource enables the resource manager, which our images and those of the Go project up to release
0.31 have. A binding that an earlier installation left for another namespace or role is replaced.
"""

import contextlib
import logging
from http import HTTPStatus
from typing import TypeVar

from accelplane.apiserver import AlreadyExists, NotFound, StatusError
from accelplane.kube.client import Client
from accelplane.kube.objects import Metadata
from accelplane.operator.daemonsets.rendering import GPU_MANAGER
from accelplane.operator.resources import ClusterRoleBinding, RoleReference, ServiceAccount, Subject
from accelplane.operator.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T", ServiceAccount, ClusterRoleBinding)

BINDING = "gpu-manager-rolebinding"


class SharedObjects:
    """The account and its binding: created if needed, and deleted once if not."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._namespace = settings.namespace
        self._reference = RoleReference(settings.gpu_manager_role)
        self._subject = Subject(GPU_MANAGER, settings.namespace)
        self._absent = False

    async def reconcile(self, *, needed: bool) -> None:
        """Creates or deletes them. Raises `ApiError`."""
        if needed:
            self._absent = False
            await self._make()
        elif not self._absent:
            try:
                await self._delete()
            except StatusError as error:
                if not error.permanent:
                    raise
                # An installation that never creates them may not have the right to delete them.
                log.warning("what GPU plugins shared is no longer needed, and stays: %s", error)
            self._absent = True

    async def _delete(self) -> None:
        """Deletes the binding that `_make` creates, and the account. Objects of others with these names stay."""
        try:
            found = await self._client.get(ClusterRoleBinding, BINDING)
        except NotFound:
            return
        if found.roleRef != self._reference or found.subjects != [self._subject]:
            log.info("ClusterRoleBinding %s is for another account or role; it stays", BINDING)
            return
        # The account first: the binding is the evidence that it belongs to this operator.
        await self._client.delete(ServiceAccount, GPU_MANAGER, self._namespace)
        metadata = found.metadata
        await self._client.delete(
            ClusterRoleBinding, BINDING, uid=metadata.uid, resource_version=metadata.resourceVersion
        )

    async def _make(self) -> None:
        """Creates what does not exist. Older manifests do not have the rights to read."""
        account = ServiceAccount(metadata=Metadata(name=GPU_MANAGER, namespace=self._namespace))
        if await self._read(account) is None:
            with contextlib.suppress(AlreadyExists):
                await self._client.create(account)
        subject, role = self._subject, self._reference
        binding = ClusterRoleBinding(metadata=Metadata(name=BINDING), roleRef=role, subjects=[subject])
        found = await self._read(binding)
        if found is None:
            try:
                await self._client.create(binding)
            except AlreadyExists:
                log.warning("ClusterRoleBinding %s exists and is not verified", BINDING)
        elif found.roleRef != role or subject not in (found.subjects or ()):
            log.info("ClusterRoleBinding %s is for another account or role; replacing it", BINDING)
            # The API server does not allow another role in a binding.
            metadata = found.metadata
            await self._client.delete(
                ClusterRoleBinding, BINDING, uid=metadata.uid, resource_version=metadata.resourceVersion
            )
            await self._client.create(binding)

    async def _read(self, desired: T) -> T | None:
        """The existing object, None if there is none or it must not be read."""
        try:
            return await self._client.get(type(desired), desired.metadata.name or "", desired.metadata.namespace or "")
        except NotFound:
            return None
        except StatusError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            return None
