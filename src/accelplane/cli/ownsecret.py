"""Stores the certificate of the SGX webhook in an existing Secret and in one MutatingWebhookConfiguration.

It needs the rights to get and to patch these two objects. With the rights to list and to watch them, changes are
noticed immediately; otherwise the objects are polled.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from msgspec import Raw, Struct

from accelplane.apiserver import JSON_PATCH, ApiError, ApiServer, NotFound, StatusError, object_path
from accelplane.kube.jsonpatch import Operation, pointer
from accelplane.kube.trust import SecretData, SecretMissing, Target, TargetKind, TrustError

log = logging.getLogger(__name__)

_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_RETRY, _MAX_RETRY = 0.5, 60.0
_FORBIDDEN_RETRY = 300.0


class _Metadata(Struct, frozen=True, rename="camel"):
    resource_version: str
    uid: str = ""


class _Secret(Struct, frozen=True):
    metadata: _Metadata
    data: Mapping[str, str] | None = None


class _Changed(Struct, frozen=True):
    """The object of a watch event. No field is read."""


class SecretStore:
    """A `TrustStore` for one Secret and one MutatingWebhookConfiguration."""

    def __init__(self, api: ApiServer, namespace: str, secret: str, configuration: str) -> None:
        self._api = api
        self._namespace, self._name = namespace, secret
        secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._secret = object_path(secrets, secret)
        self._configuration = object_path(_CONFIGURATIONS, configuration)
        self._collections = {secrets: secret, _CONFIGURATIONS: configuration}
        self._watched: set[str] = set()

    @property
    def watching(self) -> bool:
        return len(self._watched) == len(self._collections)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Watches both objects as soon as the account may."""
        async with asyncio.TaskGroup() as tasks:
            for collection, name in self._collections.items():
                tasks.create_task(self._watch(collection, name, changed))

    async def _watch(self, collection: str, name: str, changed: Callable[[], None]) -> None:
        delay = _RETRY
        while True:
            try:
                # A new watch begins with the current object.
                stream = self._api.watch(collection, _Changed, query={"fieldSelector": f"metadata.name={name}"})
                async with contextlib.aclosing(stream) as events:
                    async for _ in events:
                        self._watched.add(collection)
                        changed()
                delay = _RETRY
            except ApiError as error:
                self._watched.discard(collection)
                delay = min(2 * delay, _MAX_RETRY)
                if isinstance(error, StatusError) and error.permanent:
                    delay = _FORBIDDEN_RETRY
                    log.info("polls instead of watching: %s", error)
            changed()
            await asyncio.sleep(delay)

    async def read(self) -> SecretData | None:
        """Raises `TrustError`."""
        try:
            secret = await self._api.get(self._secret, _Secret)
        except NotFound:
            return None
        except ApiError as error:
            raise TrustError(str(error)) from error
        try:
            data = {name: base64.b64decode(text, validate=True) for name, text in (secret.data or {}).items()}
        except ValueError as error:
            raise TrustError(f"{self._secret}: {error}; expected base64") from error
        return SecretData(data, secret.metadata.resource_version, secret.metadata.uid)

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        """Raises `TrustError`. Never creates the Secret, because the webhook has no right to."""
        if version is None:
            raise SecretMissing(self._namespace, self._name, "the webhook has no right to create it")
        encoded = {name: base64.b64encode(content).decode("ascii") for name, content in data.items()}
        operations = [
            Operation("test", pointer("metadata", "resourceVersion"), version),
            Operation("add", pointer("data"), encoded),
        ]
        try:
            await self._api.patch(self._secret, operations, JSON_PATCH, Raw)
        except StatusError as error:
            # Deleted; a concurrent write; a failed test of the JSON patch.
            if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
                return False
            raise TrustError(str(error)) from error
        except ApiError as error:
            raise TrustError(str(error)) from error
        return True

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        """Raises `TrustError`."""
        try:
            return [("MutatingWebhookConfiguration", await self._api.get(self._configuration, Target))]
        except ApiError as error:
            raise TrustError(str(error)) from error

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Raises `TrustError`."""
        try:
            await self._api.patch(self._configuration, operations, JSON_PATCH, Raw)
        except ApiError as error:
            raise TrustError(str(error)) from error
