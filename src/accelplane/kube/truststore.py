"""Where a program with a `Client` keeps its webhooks' certificate: one Secret, and the objects that lead to them.

The objects are named, so that the account's rights can be for these and no others. One that does not exist needs no
trust: the custom resources of a kind that is switched off.
"""

import base64
from collections.abc import Mapping, Sequence

from lightkube.core.resource import GlobalResource, NamespacedResourceG
from msgspec import Struct

from accelplane.apiserver import AlreadyExists, ApiError, Conflict, NotFound

from .client import Client
from .jsonpatch import Operation, documents
from .objects import Metadata, api
from .trust import DefinitionSpec, Held, HookEntry, Target, TargetKind, TargetMetadata, TrustError

_HOOKS = "admissionregistration.k8s.io"


class _Secret(NamespacedResourceG, Struct, omit_defaults=True):
    metadata: Metadata
    data: dict[str, str] | None = None
    _api_info = api("", "v1", "Secret", "secrets")


class _Mutating(GlobalResource, Struct):
    metadata: Metadata
    webhooks: list[HookEntry] | None = None
    _api_info = api(_HOOKS, "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")


class _Validating(GlobalResource, Struct):
    metadata: Metadata
    webhooks: list[HookEntry] | None = None
    _api_info = api(_HOOKS, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")


class _Definition(GlobalResource, Struct):
    metadata: Metadata
    spec: DefinitionSpec
    _api_info = api("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")


_Kind = type[_Mutating] | type[_Validating] | type[_Definition]
_KINDS: Mapping[TargetKind, _Kind] = {
    "MutatingWebhookConfiguration": _Mutating,
    "ValidatingWebhookConfiguration": _Validating,
    "CustomResourceDefinition": _Definition,
}


class ClusterTrustStore:
    """A `TrustStore`: the Secret, made when it is missing, and `names` of each kind that may lead to the webhooks."""

    def __init__(self, client: Client, namespace: str, secret: str, names: Mapping[TargetKind, Sequence[str]]) -> None:
        self._client = client
        self._namespace = namespace
        self._secret = secret
        self._names = names

    async def read(self) -> Held | None:
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
        return Held(data, found.metadata.resourceVersion or "")

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
            raise TrustError(str(error)) from error
        return True

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        """Raises `TrustError`."""
        found: list[tuple[TargetKind, Target]] = []
        for kind, names in self._names.items():
            for name in names:
                try:
                    thing = await self._client.get(_KINDS[kind], name)
                except NotFound:
                    continue
                except ApiError as error:
                    raise TrustError(str(error)) from error
                metadata = TargetMetadata(name)
                if isinstance(thing, _Definition):
                    found.append((kind, Target(metadata, spec=thing.spec)))
                else:
                    found.append((kind, Target(metadata, webhooks=thing.webhooks)))
        return found

    async def patch(self, kind: TargetKind, name: str, operations: Sequence[Operation]) -> None:
        """Raises `TrustError`."""
        try:
            await self._client.patch(_KINDS[kind], name, documents(operations))
        except ApiError as error:
            raise TrustError(str(error)) from error
