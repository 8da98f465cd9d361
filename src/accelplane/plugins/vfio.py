"""PCI functions in containers through VFIO: their device nodes, and the variables with their addresses.

Kernel document: Documentation/driver-api/vfio.rst. A container needs the node of the function's IOMMU group and the
one that all groups share.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from accelplane.devices import Allocation, Device, DeviceNode
from accelplane.host import Host
from accelplane.host.drivers import vfio_group

CONTAINER_NODE = DeviceNode("/dev/vfio/vfio")


def group_nodes(host: Host, address: str) -> tuple[DeviceNode, DeviceNode]:
    """The nodes for the function at the PCI address. Raises `HostError` if it has no IOMMU group."""
    return DeviceNode(f"/dev/vfio/{vfio_group(host, address)}"), CONTAINER_NODE


def iommufd_nodes(host: Host, address: str) -> tuple[DeviceNode, ...]:
    """The function's own node and that of IOMMUFD, where the kernel (6.2 or newer) has them.

    Documentation/userspace-api/iommufd.rst.
    """
    names = host.entries(f"/sys/bus/pci/devices/{address}/vfio-dev")
    nodes = [DeviceNode(f"/dev/vfio/devices/{name}") for name in names if name.startswith("vfio")]
    return (*nodes, DeviceNode("/dev/iommu")) if nodes else ()


def number_variables(variable: str, devices: Sequence[Device], allocation: Allocation) -> Allocation:
    """The allocation with the addresses of its devices as `<variable>0`, `<variable>1`, … in the order of the request.

    These replace the devices' own variables, which are numbered by the scan.
    """
    return replace(allocation, envs={f"{variable}{number}": device.id for number, device in enumerate(devices)})
