"""`Device` and its parts: what one device id stands for, with everything a container that gets it will need."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import force_setattr, replace

from accelplane.devices.cdi import CdiDevice

# The kubelet's own words (device plugin API v1beta1); any other string counts as unhealthy there.
HealthName = Literal["Healthy", "Unhealthy"]
HEALTHY: Literal["Healthy"] = "Healthy"
UNHEALTHY: Literal["Unhealthy"] = "Unhealthy"


class DeviceNode(Struct, frozen=True):
    """A file under `/dev` that a container gets.

    `container_path` is `host_path` when left out. `permissions` is made of the letters r, w and m.
    """

    host_path: str
    container_path: str = ""
    permissions: str = "rw"

    def __post_init__(self) -> None:
        if not self.container_path:
            force_setattr(self, "container_path", self.host_path)


class Mount(Struct, frozen=True):
    """A file or directory bound into a container; `container_path` is `host_path` when left out."""

    host_path: str
    container_path: str = ""
    read_only: bool = True

    def __post_init__(self) -> None:
        if not self.container_path:
            force_setattr(self, "container_path", self.host_path)


class Device(Struct, frozen=True, kw_only=True):
    """One device id of one resource.

    `resource` is the part after the slash of the name that pods ask for (`i915` of `gpu.intel.com/i915`), `id` is
    unique within it. Nodes and mounts reach the container in the order given.

    `unit` names the physical device behind the id (`card0` for `card0-0` and `card0-1`): its shares fall sick
    together and are spread by the allocation policies. It is the id itself when left out.

    `topology` lists NUMA node numbers; None means that the device has none (the kubelet then places it anywhere).
    Left out, the framework finds them from the nodes' host paths.

    `attributes` describe the device to people and to later publishers; the kubelet is not told.
    """

    resource: str
    id: str
    unit: str = ""
    health: HealthName = HEALTHY
    reason: str = ""
    nodes: Sequence[DeviceNode] = ()
    mounts: Sequence[Mount] = ()
    envs: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cdi: CdiDevice | None = None
    topology: Sequence[int] | UnsetType | None = UNSET
    attributes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.unit:
            force_setattr(self, "unit", self.id)
        # Two scans must compare equal whether the author wrote lists or tuples.
        if not isinstance(self.nodes, tuple):
            force_setattr(self, "nodes", tuple(self.nodes))
        if not isinstance(self.mounts, tuple):
            force_setattr(self, "mounts", tuple(self.mounts))
        if not isinstance(self.topology, (tuple, UnsetType)) and self.topology is not None:
            force_setattr(self, "topology", tuple(self.topology))

    @property
    def healthy(self) -> bool:
        return self.health == HEALTHY

    def shared(self, count: int) -> Iterator["Device"]:
        """The device as `count` ids for containers to share: of `card0` these are `card0-0`, `card0-1` and so on."""
        for number in range(count):
            yield replace(self, id=f"{self.id}-{number}")


class Resource(Struct, frozen=True):
    """Yielded by a scan to keep a resource advertised though it has no device at the moment."""

    name: str


class Skipped(Struct, frozen=True):
    """Yielded by a scan for hardware that it saw and does not publish, and why. Logged once per change.

    `warning` marks what the administrator should look into, as against what is left out by design.
    """

    subject: str
    reason: str
    warning: bool = False


class Allocation(Struct, frozen=True, kw_only=True):
    """What one container gets: the answer to one container request of the kubelet's `Allocate`.

    `cdi_devices` are fully qualified names (`vendor/class=name`).
    """

    nodes: Sequence[DeviceNode] = ()
    mounts: Sequence[Mount] = ()
    envs: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cdi_devices: Sequence[str] = ()

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Allocation":
        """The union of what the devices carry, in their order, each thing once; of equal keys the last one wins."""
        nodes: dict[DeviceNode, None] = {}
        mounts: dict[Mount, None] = {}
        envs: dict[str, str] = {}
        annotations: dict[str, str] = {}
        names: dict[str, None] = {}
        for device in devices:
            nodes.update(dict.fromkeys(device.nodes))
            mounts.update(dict.fromkeys(device.mounts))
            envs.update(device.envs)
            annotations.update(device.annotations)
            if device.cdi is not None:
                names[device.cdi.qualified_name] = None
        return cls(
            nodes=tuple(nodes),
            mounts=tuple(mounts),
            envs=envs,
            annotations=annotations,
            cdi_devices=tuple(names),
        )
