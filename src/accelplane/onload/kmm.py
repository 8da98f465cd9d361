"""Kernel Module Management (KMM): which version the cluster has, and the Modules of the operator.

KMM may be installed after the operator, so its Modules are not in a cache of the manager, which would not start its
controllers without it.
"""

import logging
from http import HTTPStatus

from accelplane.apiserver import NotFound, StatusError
from accelplane.apiserver.clock import loop_time
from accelplane.kube.client import Selection
from accelplane.kube.informer import Informer
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Request, untrimmed
from accelplane.onload.modules import KmmApi, kmm_api
from accelplane.onload.names import KMM_GROUP, MANAGED_BY, MANAGED_BY_LABEL
from accelplane.onload.resources import Definition, Module

log = logging.getLogger(__name__)

_DEFINITION = f"modules.{KMM_GROUP}"
# Seconds for which the definition counts as unchanged.
_KNOWN, _MISSING = 60.0, 5.0


class Kmm:
    """The state of KMM, and a cache of the Modules that the operator manages."""

    def __init__(self, manager: Manager) -> None:
        self._client = manager.client
        self._state: KmmApi | None = None
        self._expires = float("-inf")
        self._forbidden = False
        informer = Informer(
            manager.client, Selection(labels=f"{MANAGED_BY_LABEL}={MANAGED_BY}"), watch_timeouts=manager.watch_timeouts
        )
        self.modules = informer.cache(Module, transform=untrimmed)
        manager.add_runnable(informer.run)

    async def state(self) -> KmmApi | None:
        """The API of KMM, or None if it is not installed. Queries the API server at most once a minute."""
        if loop_time() >= self._expires:
            self._state = await self._read()
            self._expires = loop_time() + (_KNOWN if self._state is not None else _MISSING)
        return self._state

    async def module(self, key: Request) -> Module | None:
        """A Module, from the cache if that has it."""
        if self.modules.synced.is_set() and (found := self.modules.get(key)) is not None:
            return found
        try:
            return await self._client.get(Module, key.name, key.namespace)
        except NotFound:
            return None

    async def _read(self) -> KmmApi | None:
        try:
            return kmm_api(await self._client.get(Definition, _DEFINITION))
        except NotFound:
            return None
        except StatusError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            # The role of the Go operator does not allow it. All versions of KMM accept the fields of 1.1.
            if not self._forbidden:
                log.warning("%s; uses the fields of KMM 1.1", error)
            self._forbidden = True
        try:
            await self._client.list(Module, Selection(fields="metadata.name=none"))
        except NotFound:
            return None
        return KmmApi()
