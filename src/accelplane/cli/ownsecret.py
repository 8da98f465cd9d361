"""Stores the certificate of the SGX webhook in an existing Secret and in one MutatingWebhookConfiguration.

It needs only the rights to get and to patch these two objects.
"""

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TypeVar

from msgspec import Raw, Struct

from accelplane.apiserver import JSON_PATCH, ApiError, ApiServer, NotFound, StatusError, object_path
from accelplane.kube.jsonpatch import Operation, pointer
from accelplane.kube.trust import SecretData, SecretMissing, Target, TargetKind, TrustError

T = TypeVar("T")

_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class _Metadata(Struct, frozen=True, rename="camel"):
    resource_version: str
    uid: str = ""


class _Secret(Struct, frozen=True):
    metadata: _Metadata
    data: Mapping[str, str] | None = None


class SecretStore:
    """A `TrustStore` for one Secret and one MutatingWebhookConfiguration."""

    def __init__(self, api: ApiServer, namespace: str, secret: str, configuration: str) -> None:
        self._api = api
        self._namespace, self._name = namespace, secret
        self._secret = object_path(f"/api/v1/namespaces/{namespace}/secrets", secret)
        self._configuration = object_path(_CONFIGURATIONS, configuration)

    @property
    def watching(self) -> bool:
        """Always False: polling two objects needs less memory than two open connections."""
        return False

    async def watch(self, changed: Callable[[], None]) -> None:
        """Never calls `changed`."""
        await asyncio.Event().wait()

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
        return [("MutatingWebhookConfiguration", await self._get(self._configuration, Target))]

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Raises `TrustError`."""
        try:
            await self._api.patch(self._configuration, operations, JSON_PATCH, Raw)
        except ApiError as error:
            raise TrustError(str(error)) from error

    async def _get(self, path: str, kind: type[T]) -> T:
        try:
            return await self._api.get(path, kind)
        except ApiError as error:
            raise TrustError(str(error)) from error
