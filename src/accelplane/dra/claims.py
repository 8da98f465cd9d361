"""ResourceClaims: the fields that are used, and reading one from the API server.

Facts: Kubernetes API `resource.k8s.io` v1, v1beta2 and v1beta1. They differ in requests: v1beta1 has the class in the
request, the others below `exactly`.
"""

import contextlib
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError, ApiServer, NotFound, resource_path
from accelplane.dra.model import ClaimError, ClaimRef
from accelplane.dra.resourceslice import API_VERSIONS, GROUP, ApiVersion

# The API allows 32 results, and 32 configurations of 10 KiB.
MAX_CLAIM = 2 * 1024 * 1024
MAX_RESULTS = 256

_DEADLINE = 10.0


class Toleration(Struct, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""

    def tolerates(self, key: str, value: str) -> bool:
        if self.operator == "Exists":
            return self.key in ("", key)
        return (self.key, self.value) == (key, value)


class Result(Struct, frozen=True, rename="camel"):
    """An allocated device. `request` may name a subrequest, as in `gpu/fast`."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    tolerations: Sequence[Toleration] | None = None
    share_id: str | None = msgspec.field(name="shareID", default=None)

    @property
    def main_request(self) -> str:
        return self.request.partition("/")[0]

    def tolerates(self, key: str, value: str) -> bool:
        """Whether the request tolerates a taint with this key and value."""
        return any(each.tolerates(key, value) for each in self.tolerations or ())


class Opaque(Struct, frozen=True):
    driver: str
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class AllocatedConfig(Struct, frozen=True):
    source: Literal["FromClass", "FromClaim"]
    requests: Sequence[str] | None = None
    opaque: Opaque | None = None

    def applies_to(self, request: str) -> bool:
        """Whether it is for a request, main or subrequest; the name of a main request includes its subrequests."""
        return not self.requests or request in self.requests or request.partition("/")[0] in self.requests


class _AllocatedDevices(Struct, frozen=True):
    results: Sequence[Result] | None = None
    config: Sequence[AllocatedConfig] | None = None


class Allocated(Struct, frozen=True):
    devices: _AllocatedDevices = _AllocatedDevices()

    @property
    def results(self) -> Sequence[Result]:
        return self.devices.results or ()

    @property
    def config(self) -> Sequence[AllocatedConfig]:
        return self.devices.config or ()


class ExactRequest(Struct, frozen=True, rename="camel"):
    device_class_name: str = ""
    count: int = 1


class DeviceRequest(Struct, frozen=True, rename="camel"):
    name: str = ""
    device_class_name: str = ""
    count: int = 1
    exactly: ExactRequest | None = None
    first_available: Sequence["DeviceRequest"] | None = None

    @property
    def alternatives(self) -> Sequence["ExactRequest | DeviceRequest"]:
        """The classes and counts of which one is allocated."""
        return self.first_available or (self.exactly or self,)


class _Devices(Struct, frozen=True):
    requests: Sequence[DeviceRequest] | None = None


class ClaimSpec(Struct, frozen=True):
    devices: _Devices = _Devices()

    @property
    def requests(self) -> Sequence[DeviceRequest]:
        return self.devices.requests or ()


class Status(Struct, frozen=True, rename="camel"):
    allocation: Allocated | None = None
    reserved_for: Sequence[msgspec.Raw] | None = None


class Metadata(Struct, frozen=True, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class Claim(Struct, frozen=True):
    metadata: Metadata
    spec: ClaimSpec = ClaimSpec()
    status: Status = Status()

    @property
    def in_use(self) -> bool:
        """Whether it is allocated, and reserved for a pod."""
        return self.status.allocation is not None and bool(self.status.reserved_for)

    def class_of(self, request: str) -> str:
        """The name of the device class of a request or subrequest, empty if the request is not in the claim."""
        main, _, part = request.partition("/")
        for each in self.spec.requests:
            if each.name == main:
                parts = [sub.device_class_name for sub in each.first_available or () if sub.name == part]
                exact = each.exactly.device_class_name if each.exactly is not None else ""
                return next(iter(parts), "") or exact or each.device_class_name
        return ""


class _ServedVersion(Struct, frozen=True):
    version: str


class _Group(Struct, frozen=True):
    versions: Sequence[_ServedVersion] | None = None


async def served_version(api: ApiServer, *, deadline: float = _DEADLINE) -> ApiVersion:
    """The newest version of the API group that the server serves. Raises `ApiError`, `NotFound` without the group."""
    group = await api.get(f"/apis/{GROUP}", _Group, deadline=deadline)
    served = {each.version for each in group.versions or ()}
    found: ApiVersion | None = next((version for version in API_VERSIONS if version in served), None)
    if found is None:
        raise not_served(served)
    return found


def not_served(served: Collection[str] = ()) -> ApiError:
    """The error if the server serves none of the versions that are supported."""
    return ApiError(
        GROUP,
        f"the API server serves {', '.join(sorted(served)) or 'no version'}, expected one of "
        f"{', '.join(API_VERSIONS)}; use Kubernetes 1.34 or newer, or set the feature gate "
        f"DynamicResourceAllocation and --runtime-config={GROUP}/v1beta1=true",
    )


class ClaimReader:
    """Reads claims in the newest version that the API server serves."""

    def __init__(self, api: ApiServer) -> None:
        # The kubelet limits the rate of its calls, and pods wait for the answers.
        self._api = api.without_rate_limit()
        self._version = ""

    async def path(self, ref: ClaimRef, subresource: str = "") -> str:
        """The path of a claim. Raises `ApiError`, or `ValueError` for an invalid name."""
        if not self._version:
            try:
                self._version = await served_version(self._api)
            except NotFound:  # says nothing about the claim
                raise ApiError(f"GET /apis/{GROUP}", "the API server does not serve the API; retrying") from None
        return resource_path(
            GROUP, self._version, "resourceclaims", namespace=ref.namespace, name=ref.name, subresource=subresource
        )

    async def find(self, ref: ClaimRef) -> Claim | None:
        """The claim, None if it does not exist or is another one of the same name. Raises `ApiError`."""
        with contextlib.suppress(NotFound, ValueError):
            claim = await self._get(ref)
            return claim if claim.metadata.uid == ref.uid else None
        return None

    async def allocated(self, ref: ClaimRef) -> Claim:
        """The claim, which is allocated. Raises `ClaimError`."""
        try:
            claim = await self._get(ref)
        except NotFound:
            raise ClaimError("the claim does not exist any more") from None
        except (ApiError, ValueError) as error:
            raise ClaimError(f"the claim cannot be read: {error}") from None
        if claim.metadata.uid != ref.uid:
            raise ClaimError(
                f"the claim was replaced: found UID {claim.metadata.uid}, expected {ref.uid}; create the pod again"
            )
        allocation = claim.status.allocation
        if allocation is None:
            raise ClaimError("the claim is not allocated")
        if len(allocation.results) > MAX_RESULTS:
            raise ClaimError(f"the claim has {len(allocation.results)} devices, expected at most {MAX_RESULTS}")
        return claim

    async def _get(self, ref: ClaimRef) -> Claim:
        version = self._version
        try:
            return await self._api.get(await self.path(ref), Claim, deadline=_DEADLINE, limit=MAX_CLAIM)
        except NotFound:
            if not version:
                raise
        # The server may serve other versions than before.
        self._version = ""
        return await self._api.get(await self.path(ref), Claim, deadline=_DEADLINE, limit=MAX_CLAIM)
