"""PCI functions for user-space drivers, behind vfio-pci.

Kernel document: Documentation/driver-api/vfio.rst. One process can open an IOMMU group, and only if a VFIO driver or no
driver is bound to each of its functions. So all functions of a group that match are one device.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from accelplane.devices import HEALTHY, UNHEALTHY, DeviceNode, Skipped
from accelplane.host import Host, HostError, PciDevice
from accelplane.host.drivers import VFIO_PCI, driver_of, vfio_group
from accelplane.host.pci import DEVICES
from accelplane.plugins.generic.config import Group, Pci, normal_id
from accelplane.plugins.generic.match import Found, Match, joined
from accelplane.plugins.vfio import group_nodes, iommufd_nodes

# drivers/vfio/vfio_main.c: these do not prevent the use of a group.
_HARMLESS = ("", VFIO_PCI, "pci-stub", "pcieport")
_BRIDGE = "0x06"
_FLAGS = re.compile(r"0x[0-9a-f]{1,8}")
_INTERFACE_UP = 0x1  # IFF_UP of netdevice(7)


def find(host: Host, name: str, group: Group, bind_problem: Callable[[str], str]) -> Found:
    """The matches of a group of PCI functions: one for each IOMMU group.

    `bind_problem` is why the function at an address could not be bound, empty if it is not known.
    """
    skipped: list[Skipped] = []
    groups: dict[str, list[tuple[Pci, PciDevice]]] = {}
    for spec in group.pci:
        functions = list(selected(host, spec))
        if not functions:
            ids = f"{normal_id(spec.vendor)}:{normal_id(spec.device)}"
            skipped.append(Skipped(f"{name}: PCI {ids}", "no such PCI function"))
        for function in functions:
            driver = driver_of(host, function.address)
            if driver != VFIO_PCI:
                problem = f"found {driver or 'no driver'} bound to it, expected {VFIO_PCI}"
                if spec.bind:
                    problem = bind_problem(function.address) or problem
                else:
                    problem += "; bind it, or set bind to true"
                skipped.append(Skipped(function.address, problem, warning=True))
                continue
            try:
                members = groups.setdefault(vfio_group(host, function.address), [])
            except HostError as error:
                skipped.append(Skipped(function.address, str(error), warning=True))
                continue
            if all(function.address != other.address for _spec, other in members):
                members.append((spec, function))
    return Found([_match(host, members) for members in groups.values()], skipped)


def selected(host: Host, spec: Pci) -> Iterator[PciDevice]:
    """The functions with the IDs and addresses."""
    for function in host.pci_devices(f"0x{normal_id(spec.vendor)}"):
        if function.device == f"0x{normal_id(spec.device)}" and (
            not spec.addresses or function.address in spec.addresses
        ):
            yield function


def in_use(host: Host, address: str) -> str:
    """Why the function must not be unbound from its driver, empty if it may be."""
    path = f"{DEVICES}/{address}"
    try:
        interfaces = host.optional_names(f"{path}/net")
        if not interfaces and host.exists(f"{path}/net"):
            # The kernel shows only those of the network namespace that sysfs was mounted in.
            return "its network interface is in another network namespace, maybe of a pod; mount /sys of the node"
        for interface in interfaces:
            if _is_up(host.text(f"{path}/net/{interface}/flags")):
                return f"its network interface {interface} is up; set it down, or set bind to false"
        if host.vf_count(path) not in ("0", "-1"):
            return "it has virtual functions; remove them, or select these"
        real = f"{host.resolve(path)}/"
        for disk in host.class_devices("block"):
            if host.resolve(disk.path).startswith(real):
                return f"it has the disk {disk.name}; set bind to false"
    except HostError as error:
        return f"its use is unknown: {error}"
    return ""


def _is_up(flags: str) -> bool:
    """Whether the flags of a network interface have IFF_UP. Those that are no number count as up."""
    return not _FLAGS.fullmatch(flags) or bool(int(flags, 16) & _INTERFACE_UP)


def _match(host: Host, members: Sequence[tuple[Pci, PciDevice]]) -> Match:
    """Raises `HostError`."""
    functions = [function for _spec, function in members]
    first = functions[0]
    nodes: list[DeviceNode] = [*group_nodes(host, first.address)]
    for spec, function in members:
        if spec.iommufd:
            nodes += iommufd_nodes(host, function.address)
    reason = _obstacle(host, first.address)
    addresses = ",".join(function.address for function in functions)
    return Match(
        unit=joined([function.address for function in functions]),
        nodes=tuple(dict.fromkeys(nodes)),
        path=first.path,
        topology=host.topology_of(*(function.path for function in functions)),
        health=UNHEALTHY if reason else HEALTHY,
        reason=reason,
        attributes={"device-id": first.device, "kind": "pci"},
        values={
            "path": nodes[0].host_path,
            "containerPath": nodes[0].container_path,
            "name": first.address,
            "serial": "",
            "address": addresses,
        },
    )


def _obstacle(host: Host, address: str) -> str:
    """Why the kernel does not allow the use of the function's IOMMU group, empty if it does."""
    link = f"{DEVICES}/{address}/iommu_group"
    for other in host.entries(f"{link}/devices"):
        driver = driver_of(host, other)
        if driver not in _HARMLESS and not host.text_or_empty(f"{DEVICES}/{other}/class").startswith(_BRIDGE):
            return f"{other} of the same IOMMU group is bound to {driver}, expected {VFIO_PCI} or no driver"
    return ""
