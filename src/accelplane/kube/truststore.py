"""A `TrustStore` on a `Client`: one Secret, and named objects that refer to the webhooks.

All objects are named, so the account needs rights for these names only. `list` and `watch` with a field selector for
`metadata.name` are covered by rights with `resourceNames`. A target that does not exist is skipped: the
CustomResourceDefinition of a disabled kind.
"""

import asyncio
import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus

from msgspec import Struct

from accelplane.apiserver import AlreadyExists, ApiError, Conflict, NotFound, StatusError

from .client import Client, Selection
from .informer import Informer
from .jsonpatch import Operation, documents
from .objects import GlobalResource, Metadata, NamespacedResource, Object, api
from .trust import (
    DefinitionSpec,
    SecretData,
    SecretMissing,
    Target,
    TargetKind,
    TargetMetadata,
    TrustError,
    WebhookEntry,
)

log = logging.getLogger(__name__)

_HOOKS = "admissionregistration.k8s.io"
# Seconds between checks whether the account may watch.
_RIGHTS_CHECK = 300.0


# Watches need only the metadata, so the API server omits the rest.


class SecretMetadata(NamespacedResource, Struct):
    """The Secret, without its content."""

    metadata: Metadata
    _api_info = api("", "v1", "Secret", "secrets")


class _MutatingMetadata(GlobalResource, Struct):
    metadata: Metadata
    _api_info = api(_HOOKS, "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")


class _ValidatingMetadata(GlobalResource, Struct):
    metadata: Metadata
    _api_info = api(_HOOKS, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")


class _DefinitionMetadata(GlobalResource, Struct):
    metadata: Metadata
    _api_info = api("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")


class _Secret(SecretMetadata, omit_defaults=True):
    data: dict[str, str] | None = None


class _Mutating(_MutatingMetadata):
    webhooks: list[WebhookEntry] | None = None


class _Validating(_ValidatingMetadata):
    webhooks: list[WebhookEntry] | None = None


class _Definition(_DefinitionMetadata):
    spec: DefinitionSpec


_Kind = type[_Mutating] | type[_Validating] | type[_Definition]
_KINDS: Mapping[TargetKind, tuple[_Kind, type[Object]]] = {
    "MutatingWebhookConfiguration": (_Mutating, _MutatingMetadata),
    "ValidatingWebhookConfiguration": (_Validating, _ValidatingMetadata),
    "CustomResourceDefinition": (_Definition, _DefinitionMetadata),
}


class ClusterTrustStore:
    """A `TrustStore` for one Secret, created if it is missing, and for `names` of each kind of target."""

    def __init__(self, client: Client, namespace: str, secret: str, names: Mapping[TargetKind, Sequence[str]]) -> None:
        self._client = client
        self._namespace = namespace
        self._secret = secret
        self._names = names
        self._watches = list(self._metadata_watches())

    @property
    def watching(self) -> bool:
        return all(informer.synced.is_set() for informer, _ in self._watches)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Watches the metadata of all objects as soon as the account may."""
        async with asyncio.TaskGroup() as tasks:
            for informer, kind in self._watches:
                cache = informer.cache(kind)
                cache.subscribe(lambda _old, _new: changed())
                tasks.create_task(informer.run_when_permitted(_log_forbidden, retry=_RIGHTS_CHECK))

    async def read(self) -> SecretData | None:
        """Raises `TrustError`."""
        try:
            found = await self._client.get(_Secret, self._secret, self._namespace)
            data = {name: base64.b64decode(text, validate=True) for name, text in (found.data or {}).items()}
        except NotFound:
            return None
        except ApiError as error:
            raise TrustError(str(error)) from error
        except ValueError as error:
            raise TrustError(f"secret {self._namespace}/{self._secret}: {error}; expected base64") from error
        return SecretData(data, found.metadata.resourceVersion or "", found.metadata.uid or "")

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        """Raises `TrustError`."""
        encoded = {name: base64.b64encode(content).decode("ascii") for name, content in data.items()}
        try:
            if version is None:
                metadata = Metadata(name=self._secret, namespace=self._namespace)
                await self._client.create(_Secret(metadata, encoded))
            else:
                change = {"metadata": {"resourceVersion": version}, "data": encoded}
                await self._client.patch(_Secret, self._secret, change, namespace=self._namespace)
        except (AlreadyExists, Conflict, NotFound):
            return False
        except ApiError as error:
            if version is None and isinstance(error, StatusError) and error.code == HTTPStatus.FORBIDDEN:
                raise SecretMissing(self._namespace, self._secret, str(error)) from error
            raise TrustError(str(error)) from error
        return True

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        """Raises `TrustError`."""
        found: list[tuple[TargetKind, Target]] = []
        for kind, names in self._names.items():
            for name in names:
                try:
                    target = await self._client.get(_KINDS[kind][0], name)
                except NotFound:
                    continue
                except ApiError as error:
                    raise TrustError(str(error)) from error
                metadata = TargetMetadata(name)
                if isinstance(target, _Definition):
                    found.append((kind, Target(metadata, spec=target.spec)))
                else:
                    found.append((kind, Target(metadata, webhooks=target.webhooks)))
        return found

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Raises `TrustError`."""
        try:
            await self._client.patch(_KINDS[kind][0], name, documents(operations))
        except ApiError as error:
            raise TrustError(str(error)) from error

    def _metadata_watches(self) -> Iterator[tuple[Informer, type[Object]]]:
        secret = Selection(namespace=self._namespace, fields=f"metadata.name={self._secret}")
        yield Informer(self._client, secret), SecretMetadata
        for kind, names in self._names.items():
            for name in names:
                yield Informer(self._client, Selection(fields=f"metadata.name={name}")), _KINDS[kind][1]


def _log_forbidden(error: StatusError) -> None:
    log.info("polls instead of watching: %s", error)
