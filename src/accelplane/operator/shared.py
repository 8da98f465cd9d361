"""What the GPU plugins of all custom resources share: the account of the resource manager, and its rights.

It is there while any resource asks for the resource manager, which only images of releases up to 0.31 have.
"""

import logging

from accelplane.apiserver import AlreadyExists, StatusError
from accelplane.kube.client import Client
from accelplane.kube.objects import Metadata
from accelplane.operator.daemonsets.rendering import GPU_MANAGER
from accelplane.operator.resources import ClusterRoleBinding, RoleReference, ServiceAccount, Subject
from accelplane.operator.settings import Settings

log = logging.getLogger(__name__)

BINDING = "gpu-manager-rolebinding"


class SharedObjects:
    """The account and its binding, made when they are needed and deleted once when they are not."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._namespace = settings.namespace
        self._role = settings.gpu_manager_role
        self._absent = False

    async def reconcile(self, *, needed: bool) -> None:
        """Makes or deletes them. Raises `ApiError`."""
        if needed:
            self._absent = False
            await self._make()
        elif not self._absent:
            try:
                await self._client.delete(ClusterRoleBinding, BINDING)
                await self._client.delete(ServiceAccount, GPU_MANAGER, self._namespace)
            except StatusError as error:
                if not error.permanent:
                    raise
                # An installation that never made them may not be allowed to delete them either.
                log.warning("what GPU plugins shared is no longer needed, and stays: %s", error)
            self._absent = True

    async def _make(self) -> None:
        account = ServiceAccount(metadata=Metadata(name=GPU_MANAGER, namespace=self._namespace))
        binding = ClusterRoleBinding(
            metadata=Metadata(name=BINDING),
            roleRef=RoleReference(self._role),
            subjects=[Subject(GPU_MANAGER, self._namespace)],
        )
        for wanted in (account, binding):
            try:
                await self._client.create(wanted)
            except AlreadyExists:
                continue
