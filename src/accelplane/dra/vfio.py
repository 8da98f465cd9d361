"""Binding of a PCI function to a VFIO driver for a claim, and back.

Kernel documents: Documentation/driver-api/vfio.rst (all functions of an IOMMU group belong to one user),
Documentation/ABI/testing/sysfs-bus-pci. A function that was bound to a VFIO driver before the claim stays bound.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping

from accelplane.devices import CdiNode, DeviceNode
from accelplane.dra.cdi import Edits
from accelplane.dra.journal import Rebind
from accelplane.dra.model import ClaimError
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.drivers import (
    DRIVERS,
    VFIO_PCI,
    BindError,
    bind,
    bind_problem,
    driver_of,
    driver_override,
    is_loaded,
    vfio_group_is_open,
)
from accelplane.host.pci import DEVICES
from accelplane.plugins.vfio import group_nodes, iommufd_nodes

XE_VFIO_PCI = "xe-vfio-pci"
VFIO_DRIVERS = (XE_VFIO_PCI, VFIO_PCI)

# Drivers that do not prevent the use of a group (drivers/vfio/vfio_iommu.c, drivers/iommu/iommu.c: bridges, and
# drivers with driver_managed_dma).
_HARMLESS = frozenset(("", *VFIO_DRIVERS, "pci-stub", "pcieport"))
_BRIDGE = "0x0604"
_PID = re.compile(r"[0-9]+")
_PROBE = "/sys/bus/pci/drivers_probe"
_MAX_PROCESSES, _MAX_DESCRIPTORS = 8192, 4096


def plan(host: Host, address: str, holders: Mapping[str, str], *, manage_binding: bool) -> Rebind | None:
    """What has to be undone after the function was bound for a claim, None if it is bound to a VFIO driver already.

    `holders` are the claims that hold functions, by PCI address. Raises `ClaimError` if it cannot be bound, or
    `HostError`.
    """
    device = f"{DEVICES}/{address}"
    before = driver_of(host, address)
    if not host.exists(f"{device}/iommu_group"):
        raise ClaimError(f"{address} has no IOMMU group; enable the IOMMU (intel_iommu=on) for access: vfio")
    _check_group(host, address, holders)
    if before in VFIO_DRIVERS:
        return None
    if not manage_binding:
        raise ClaimError(
            f"{address} is bound to {before or 'no driver'}, expected a VFIO driver: binding is disabled on this node; "
            "set -dra-manage-binding, or bind it"
        )
    if (vfs := host.vf_count(device)) not in ("0", "-1"):
        raise ClaimError(
            f"{address} has {vfs} virtual functions, expected none for access: vfio; set sriov_numvfs to 0"
        )
    if user := _drm_user(host, address):
        raise ClaimError(f"{address} cannot be bound to VFIO: process {user} has its DRM node open; end it")
    driver = XE_VFIO_PCI if before == "xe" and is_loaded(host, XE_VFIO_PCI) else VFIO_PCI
    if problem := bind_problem(host, address, driver):
        raise ClaimError(problem)
    return Rebind(address=address, bound=driver, driver=before, override=driver_override(host, address))


def do(host: Host, step: Rebind) -> None:
    """Binds the function to the VFIO driver. Raises `HostError` if it is not bound afterwards."""
    bind(host, step.address, step.bound)
    if (found := driver_of(host, step.address)) != step.bound:
        raise BindError(f"{DEVICES}/{step.address}", f"bound to {found or 'no driver'}, expected {step.bound}")


def undo(host: Host, step: Rebind) -> None:
    """Binds the function to its driver again if it is still as `do` left it, also in part. Raises `HostError`."""
    device = f"{DEVICES}/{step.address}"
    if not host.exists(device):
        return
    now = driver_of(host, step.address)
    if now == step.bound and vfio_group_is_open(host, step.address):
        raise BindError(device, f"in use: its VFIO group is open; it stays bound to {now}")
    if now in (step.bound, "") and now != step.driver:
        if step.driver:
            bind(host, step.address, step.driver)
        elif now:
            host.write(f"{DRIVERS}/{now}/unbind", step.address)
        if (found := driver_of(host, step.address)) != step.driver:
            raise BindError(device, f"bound to {found or 'no driver'}, expected {step.driver or 'no driver'}")
    if driver_override(host, step.address) in (step.bound, step.driver) and (
        driver_override(host, step.address) != step.override
    ):
        host.write(f"{device}/driver_override", step.override or "\n")


def reset(host: Host, address: str) -> None:
    """Lets the kernel select the driver of a function that is bound to a VFIO driver, or that was. Raises `HostError`.

    Does nothing if another driver is bound. Without a driver for the function it stays unbound.
    """
    device = f"{DEVICES}/{address}"
    now, override = driver_of(host, address), driver_override(host, address)
    if not host.exists(device) or (now or override) not in VFIO_DRIVERS:
        return
    if now and vfio_group_is_open(host, address):
        raise BindError(device, f"in use: its VFIO group is open; it stays bound to {now}")
    if override in VFIO_DRIVERS:
        host.write(f"{device}/driver_override", "\n")
    if now:
        host.write(f"{DRIVERS}/{now}/unbind", address)
    host.write(_PROBE, address)


def edits(host: Host, address: str, *, iommufd: bool) -> Edits:
    """The device nodes of a function that is bound to a VFIO driver. Raises `HostError` if there are none."""
    group, container = group_nodes(host, address)
    nodes: list[DeviceNode] = [container, group]
    functions = list(iommufd_nodes(host, address))
    if iommufd and not functions:
        raise Missing(f"{DEVICES}/{address}/vfio-dev", "does not exist: the kernel has no IOMMUFD nodes (Linux 6.2)")
    nodes += [node for node in functions if iommufd or node.host_path.startswith("/dev/vfio/devices/")]
    found = [node for node in nodes if iommufd or node in (container, group) or host.exists(node.host_path)]
    return Edits(nodes=tuple([CdiNode(node.container_path, node.host_path, node.permissions) for node in found]))


def group_locks(host: Host, addresses: Iterable[str]) -> set[str]:
    """Names of locks for the IOMMU groups of functions: one decision at a time about the drivers of a group."""
    found: set[str] = set()
    for address in addresses:
        with contextlib.suppress(HostError):
            found.add(f"group {host.link(f'{DEVICES}/{address}/iommu_group')}")
    return found


def _check_group(host: Host, address: str, holders: Mapping[str, str]) -> None:
    """Raises `ClaimError` if another function of the IOMMU group has a driver or a holder, or `HostError`."""
    for other in host.names(f"{DEVICES}/{address}/iommu_group/devices"):
        if other == address or pci_address(other) is None:
            continue
        if host.text_or_empty(f"{DEVICES}/{other}/class").startswith(_BRIDGE):
            continue
        if holder := holders.get(other, ""):
            raise ClaimError(f"{address} cannot be bound to VFIO: {other} of its IOMMU group is held by {holder}")
        driver = driver_of(host, other)
        if driver not in _HARMLESS:
            raise ClaimError(
                f"{address} cannot be bound to VFIO: {other} of its IOMMU group is bound to {driver}; unbind it, or "
                "use another device"
            )


def _drm_user(host: Host, address: str) -> str:
    """The number of a process that has a DRM node of the function open, empty if none is visible."""
    try:
        nodes = {f"/dev/dri/{name}" for name in host.names(f"{DEVICES}/{address}/drm")}
        pids = [name for name in host.names("/proc") if _PID.fullmatch(name) and name != str(os.getpid())]
    except HostError:
        return ""
    for pid in pids[:_MAX_PROCESSES]:
        for descriptor in host.entries(f"/proc/{pid}/fd")[:_MAX_DESCRIPTORS]:
            try:
                if host.link(f"/proc/{pid}/fd/{descriptor}") in nodes:
                    return pid
            except HostError:
                continue
    return ""
