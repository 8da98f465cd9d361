"""`Device` and its parts: a device ID with everything that a container with the device gets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import force_setattr, replace

from accelplane.devices.cdi import CdiDevice
from accelplane.devices.unit import Attribute, text_of

# Constants of the device plugin API v1beta1. For the kubelet any other text is unhealthy.
HealthName = Literal["Healthy", "Unhealthy"]
HEALTHY: Literal["Healthy"] = "Healthy"
UNHEALTHY: Literal["Unhealthy"] = "Unhealthy"


class DeviceNode(Struct, frozen=True):
    """A device node that a container gets, by default at `host_path`. `permissions` has the letters r, w and m."""

    host_path: str
    container_path: str = ""
    permissions: str = "rw"

    def __post_init__(self) -> None:
        if not self.container_path:
            force_setattr(self, "container_path", self.host_path)


class Mount(Struct, frozen=True):
    """A bind mount of a file or directory. The default of `container_path` is `host_path`."""

    host_path: str
    container_path: str = ""
    read_only: bool = True

    def __post_init__(self) -> None:
        if not self.container_path:
            force_setattr(self, "container_path", self.host_path)


class Device(Struct, frozen=True, kw_only=True):
    """One device ID of one resource.

    `resource` is the name of the resource without the namespace (`i915` of `gpu.intel.com/i915`). `id` is unique within
    the resource. Containers get nodes and mounts in the given order.

    `unit` is the physical device behind the ID (`card0` for `card0-0` and `card0-1`). All IDs of a unit have the same
    health, and allocation policies count them together. The default is the ID.

    `path` is the sysfs directory of what the ID stands for: IDs with one path are one `Unit`. By default it is that of
    the device nodes, and IDs with the same `unit` are one. None is an ID that stands for several devices. `part` names
    a part of a PCI function that has several, the same after a reboot: `wq1`.

    `topology` lists NUMA nodes; None is a device without a NUMA node, which the kubelet aligns with any. By default the
    framework reads the NUMA nodes of the device nodes' host paths.

    `attributes` and `capacities` describe the device. The kubelet does not get them. `bdf` is the PCI address and
    `product` the name of the product, if others than those of the PCI function of the device apply.
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
    attributes: Mapping[str, Attribute] = {}
    capacities: Mapping[str, int] = {}
    path: str | None = ""
    part: str = ""

    def __post_init__(self) -> None:
        if not self.unit:
            force_setattr(self, "unit", self.id)
        # Scans compare devices: lists and tuples must be equal.
        if not isinstance(self.nodes, tuple):
            force_setattr(self, "nodes", tuple(self.nodes))
        if not isinstance(self.mounts, tuple):
            force_setattr(self, "mounts", tuple(self.mounts))
        if not isinstance(self.topology, (tuple, UnsetType)) and self.topology is not None:
            force_setattr(self, "topology", tuple(self.topology))

    @property
    def healthy(self) -> bool:
        return self.health == HEALTHY

    def text(self, attribute: str) -> str:
        """The attribute as text, empty if there is none."""
        return text_of(self.attributes, attribute)

    def shared(self, count: int) -> Iterator["Device"]:
        """Yields the device with `count` IDs, for sharing: `card0-0`, `card0-1` and so on for `card0`."""
        for number in range(count):
            yield replace(self, id=f"{self.id}-{number}")


class Resource(Struct, frozen=True):
    """Yielded by a scan to advertise a resource without devices."""

    name: str


class Skipped(Struct, frozen=True):
    """Yielded by a scan for hardware that it does not publish, with the reason. Changes are logged.

    `warning` is set if an administrator should act, not if the hardware is skipped by design.
    """

    subject: str
    reason: str
    warning: bool = False


class Allocation(Struct, frozen=True, kw_only=True):
    """The response to one container request of `Allocate`. `cdi_devices` are qualified names (`vendor/class=name`)."""

    nodes: Sequence[DeviceNode] = ()
    mounts: Sequence[Mount] = ()
    envs: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cdi_devices: Sequence[str] = ()

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "Allocation":
        """Returns the union of the devices' files and variables, without duplicates. The last of equal keys wins."""
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
            nodes=tuple(nodes), mounts=tuple(mounts), envs=envs, annotations=annotations, cdi_devices=tuple(names)
        )
