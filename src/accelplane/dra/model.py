"""Values and protocols that the parts of the DRA driver share.

The node offers units (`Offers`). `catalog` makes a `Pool` of them, and `publisher` writes it as ResourceSlices. The
kubelet asks a `ClaimPreparer` to prepare claims. A driver is named as the namespace of the plugin's resources:
`gpu.intel.com`. Facts: Kubernetes API `resource.k8s.io`, kubelet API `dra`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from accelplane.devices import Allocation, Attribute, CdiDevice, Unit

Owner = Literal["plugin", "dra", "none"]
State = Literal["healthy", "degraded", "unhealthy", "recovering", "unbound", "gone", "cleanup"]
Effect = Literal["None", "NoSchedule", "NoExecute"]

_MAX_ERROR = 300


class Offer(Struct, frozen=True, kw_only=True):
    """A unit of this node and who hands it out.

    `owner` is the API that may hand the unit out now, "none" while the unit changes its owner. `reason` is a short word
    for a state that is not healthy, `text` describes it. `shares` is the number of containers that may have the unit.
    `containers` are the containers, `namespace/pod/container`, that hold the unit by the device plugin.
    """

    unit: Unit
    owner: Owner
    state: State = "healthy"
    reason: str = ""
    text: str = ""
    shares: int = 1
    containers: Sequence[str] = ()


def overlap(unit: Unit, other: Unit) -> bool:
    """Whether they are one unit, or one is the complete function that the other is a part or virtual function of."""
    return unit.id in (other.id, other.parent) or other.id == unit.parent


class Offers(Protocol):
    """The units of one driver. Implemented by the node; all calls come from the event loop."""

    def units(self) -> Mapping[str, Offer]:
        """The offers by unit ID, of all owners, in natural order. The same object until something changes."""
        ...

    async def changed(self) -> None:
        """Returns after the next change of `units`."""
        ...

    async def allocation(self, units: Sequence[str]) -> Allocation:
        """What a container with these units gets, by the hooks of the plugin.

        Raises `accelplane.kubelet.server.AllocationError`.
        """
        ...

    def cdi_devices(self, names: Sequence[str]) -> Sequence[CdiDevice]:
        """The CDI devices of the plugin that an allocation names. The file of the claim gets what they contain."""
        ...


class Taint(Struct, frozen=True):
    key: str
    value: str
    effect: Effect


class Capacity(Struct, frozen=True):
    """A capacity with its value. With `default`, the amount of a request that names none, the capacity is consumed.

    A request for less than `minimum` takes the minimum.
    """

    value: int
    default: int | None = None
    minimum: int | None = None


class PoolDevice(Struct, frozen=True, kw_only=True):
    """A device of a slice. `counters` are the counters that it consumes, by counter set.

    `multiple`: it may be allocated several times, and its capacities with a default are consumed.
    """

    name: str
    unit: str
    attributes: Mapping[str, Attribute]
    capacities: Mapping[str, Capacity] = {}
    taints: Sequence[Taint] = ()
    counters: Mapping[str, Mapping[str, int]] = {}
    multiple: bool = False


class DeviceName(Struct, frozen=True, kw_only=True):
    """What the name of a device means, also while the device is not published.

    `slot` is the part of the unit: empty for all of it, or the name of a tile (`t0`) or of a share (`s0`). Devices of
    different slots can be prepared at the same time, but none beside the complete unit. `tile` is the number of the
    tile. `multiple` as in `PoolDevice`: each share ID of an allocation is a slot.
    """

    unit: str
    slot: str = ""
    tile: int | None = None
    multiple: bool = False


class Pool(Struct, frozen=True, kw_only=True):
    """What one driver publishes for this node. `name` is the name of the pool in claims: the node's name.

    `counter_sets` has the counters of each set, with their values.
    """

    driver: str
    name: str
    devices: Sequence[PoolDevice] = ()
    counter_sets: Mapping[str, Mapping[str, int]] = {}


class Features(Struct, frozen=True):
    """What the API server preserves in slices, None while it is not known."""

    taints: bool | None = None
    counters: bool | None = None
    consumable: bool | None = None


class DeviceHealth(Struct, frozen=True):
    """The health of a device for the kubelet's health stream. `message` has at most 1,024 bytes."""

    device: str
    health: Literal["HEALTHY", "UNHEALTHY", "UNKNOWN"]
    message: str = ""


class ClaimRef(Struct, frozen=True):
    namespace: str
    uid: str
    name: str


class PreparedDevice(Struct, frozen=True):
    """A prepared device of a claim. `requests` are main requests, `cdi_ids` qualified names of CDI devices."""

    requests: Sequence[str]
    pool: str
    device: str
    cdi_ids: Sequence[str]
    share_id: str = ""


class ClaimError(Exception):
    """A claim cannot be prepared or unprepared now. The text is one line of at most 300 characters for a pod event."""


def error_line(text: str) -> str:
    """The text for a pod event: one line of at most 300 characters, not empty."""
    text = " ".join(text.split()) or "internal error: no reason given"
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR - 1]}…"


class ClaimPreparer(Protocol):
    """Prepares claims of one driver."""

    async def prepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, Sequence[PreparedDevice] | ClaimError]:
        """By the UID of each claim its devices, or why it is not prepared. Never raises for a single claim."""
        ...

    async def unprepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, ClaimError | None]:
        """By the UID of each claim None, also for unknown claims, or why it is still prepared."""
        ...

    def prepared(self) -> Mapping[str, Sequence[str]]:
        """The claims that hold each unit, by unit ID, as `namespace/name`, or as UID if their file is damaged."""
        ...

    def bound(self) -> Mapping[str, Unit]:
        """The units, by unit ID, that claims have bound to a VFIO driver.

        A scan may not find them, and they are not gone. `Offers.units` contains them with these values.
        """
        ...

    def cleanup(self) -> Mapping[str, str]:
        """The units that could not be reset after a claim, or whose journal file is damaged, with the reason."""
        ...

    async def changed(self) -> None:
        """Returns after the next change of `prepared`, `bound` or `cleanup`."""
        ...
