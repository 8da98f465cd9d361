"""Values of the embedded kubelet for dynamic resource allocation (DRA), and what it needs of the API server."""

from typing import Protocol

from msgspec import Struct

# The first versions of Kubernetes with each behaviour; later versions up to the next one behave equally.
DRA_BEHAVIOURS = ("1.33", "1.34", "1.36", "1.37")


class ClaimApiError(Exception):
    """The API server has not answered, or with an error."""


class AllocatedClaim(Struct, frozen=True, kw_only=True):
    """A ResourceClaim: the drivers of its allocated devices, and the names of the pods for which it is reserved."""

    namespace: str
    name: str
    uid: str
    drivers: tuple[str, ...]
    reserved_for: tuple[str, ...]


class ClaimApi(Protocol):
    """The requests of a kubelet to the API server. The methods raise `ClaimApiError`."""

    async def claim(self, namespace: str, name: str) -> AllocatedClaim: ...

    async def delete_slices(self, driver: str) -> None:
        """Deletes the ResourceSlices of this node, "" those of all drivers."""
        ...


class PodStartError(Exception):
    """The claims of an admitted pod cannot be prepared now. A kubelet retries; a pod's event has the text."""


class ClaimDevice(Struct, frozen=True):
    """A device of a prepared claim as its driver has described it. Without `requests` it is for all of them."""

    pool: str
    device: str
    requests: tuple[str, ...]
    cdi_ids: tuple[str, ...]
    share_id: str = ""


class DraBehaviour:
    """What differs between versions of the kubelet."""

    def __init__(self, version: str) -> None:
        """`version` is one of `DRA_BEHAVIOURS`."""
        minor = int(version.split(".")[1])
        self.services = ("v1.DRAPlugin", "v1beta1.DRAPlugin") if minor >= 34 else ("v1beta1.DRAPlugin",)
        # Otherwise a connection is opened for a call, and a registered plugin counts as connected.
        self.keeps_connections = minor >= 34
        # Otherwise a registration that has failed is tried again only with a new socket.
        self.retries_registration = minor >= 36
        # The gate ResourceHealthStatus is on.
        self.watches_health = minor >= 36
        # In the order of preference. Otherwise v1alpha1 is tried even if the plugin does not name it.
        self.health_services = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth") if minor >= 37 else ()
        self.replaces_devices = minor >= 37
        self.refuses_unpreparing = minor >= 37
        self.lists_claims = minor >= 34  # in the pod resources API
        self.lists_share_ids = minor >= 35
