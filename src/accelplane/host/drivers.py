"""Driver binding and SR-IOV of PCI functions.

Facts: Documentation/ABI/testing/sysfs-bus-pci (bind, unbind, new_id, driver_override, sriov_numvfs, virtfn<N>) and
Documentation/driver-api/vfio.rst. A driver binds to a function on a write to its `bind`, if it knows the function's id
or `driver_override` names the driver; vfio-pci knows no ids by itself.
"""

import contextlib
import errno
import os
import re
from collections.abc import Sequence

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError
from accelplane.host.host import Host
from accelplane.host.pci import DEVICES, pci_address

VFIO_PCI = "vfio-pci"
DRIVERS = "/sys/bus/pci/drivers"

# Errors of a container that has the host's sysfs mounted read-only.
_NOT_WRITABLE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
# Functions that vfio-pci rejects since Linux 5.9 (drivers/vfio/pci/vfio_pci.c, vfio_pci_dev_in_denylist).
_DENYLIST = frozenset(("0x0435", "0x0443", "0x19e2", "0x19e3", "0x37c8", "0x37c9", "0x0b25", "0x0cfe"))
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VIRTFN = re.compile(r"virtfn[0-9]{1,9}")


class BindError(HostError):
    """A function cannot be bound to a driver; the message has the remedy.

    `attempted` is whether anything was written for it, which uevents report to every listener.
    """

    def __init__(self, path: str, problem: str, errno: int = 0, *, attempted: bool = False) -> None:
        super().__init__(path, problem, errno)
        self.attempted = attempted


def driver_of(host: Host, address: str) -> str:
    """The name of the driver that the function is bound to, empty if none."""
    return host.driver_or_empty(f"{DEVICES}/{address}")


def driver_override(host: Host, address: str) -> str:
    """The driver that the function's `driver_override` names, empty if none."""
    return host.text_or_empty(f"{DEVICES}/{address}/driver_override").replace("(null)", "")


def is_loaded(host: Host, driver: str) -> bool:
    """Whether the driver is registered with the PCI bus."""
    return host.exists(f"{DRIVERS}/{driver}")


def vf_links(host: Host, pf: str) -> list[str]:
    """The names of the links to virtual functions in the directory of a physical one, by number. Raises `HostError`."""
    return sorted(filter(_VIRTFN.fullmatch, host.names(pf)), key=lambda name: int(name.removeprefix("virtfn")))


def vf_address(host: Host, link: str) -> str:
    """The PCI address of the virtual function behind the link. Raises `HostError`."""
    target = host.link(link).rstrip("/").rpartition("/")[2]
    address = pci_address(target)
    if address is None:
        raise Unreadable(link, f"leads to {target[:40]!a}, expected a PCI address")
    return address


def bind(host: Host, address: str, driver: str, *, new_id: bool = False) -> None:
    """Binds the function to `driver`, after it is unbound from its current one. No-op if it is bound to it.

    With `new_id`, if the function's `driver_override` cannot be written, its id is written to the driver's `new_id`
    until the function is bound; the driver then binds to every unbound function of that id as well.
    Raises `BindError` after rollback: the function is bound to its previous driver, if that accepts it.
    """
    before = driver_of(host, address)
    if before == driver:
        return
    _check(host, address, before, driver)
    device = f"{DEVICES}/{address}"
    previous = driver_override(host, address)
    override = _override(host, device, driver)
    try:
        if before:
            host.write(f"{DRIVERS}/{before}/unbind", address)
        try:
            host.write(f"{DRIVERS}/{driver}/bind", address)
        except HostError as error:
            if override or not new_id or error.errno != errno.ENODEV:
                raise
            _bind_by_id(host, device, address, driver)
    except HostError as error:
        now = driver_of(host, address)
        if now == driver:
            return  # bound by another process, such as udev after it loaded the module
        if override:
            with contextlib.suppress(HostError):
                host.write(f"{device}/driver_override", previous or "\n")
        if before and not now:
            with contextlib.suppress(HostError):
                host.write(f"{DRIVERS}/{before}/bind", address)
        causes = likely_causes(host, address, driver)
        if not override:
            causes.append("its driver_override could not be written")
        problem = "; ".join((str(error), *causes))
        raise BindError(device, f"cannot be bound to {driver}: {problem}", error.errno, attempted=True) from None


def bind_problem(host: Host, address: str, driver: str) -> str:
    """Why `bind` would fail before it writes anything; empty if it would not."""
    before = driver_of(host, address)
    try:
        if before != driver:
            _check(host, address, before, driver)
    except BindError as error:
        return str(error)
    return ""


def vfio_group(host: Host, address: str) -> str:
    """The name of the function's node below `/dev/vfio`. Raises `Missing` if it has no IOMMU group, `Unreadable`."""
    link = f"{DEVICES}/{address}/iommu_group"
    group = host.link(link).rstrip("/").rpartition("/")[2]
    if not _GROUP.fullmatch(group):
        raise Unreadable(link, f"leads to {group[:40]!a}, expected a group's number")
    return f"noiommu-{group}" if host.text_or_empty(f"{link}/name") == "vfio-noiommu" else group


def vfio_group_is_open(host: Host, address: str) -> bool:
    """Whether a process has the function's VFIO group open; a second one cannot open it.

    Without permission to open it, the group counts as open: unbinding a function in use blocks in the kernel.
    """
    try:
        os.close(host.open(f"/dev/vfio/{vfio_group(host, address)}", os.O_RDWR))
    except OSError as error:
        return error.errno in (errno.EBUSY, errno.EPERM, errno.EACCES)
    except HostError:
        return False
    return False


def iommu_enabled(host: Host) -> bool:
    """Whether the kernel uses an IOMMU."""
    return bool(host.entries("/sys/class/iommu"))


def likely_causes(host: Host, address: str, driver: str, parameter: Sequence[str] = ("N", "")) -> list[str]:
    """Why the driver probably rejects the function. `parameter`: texts of module parameters that do not allow it."""
    causes: list[str] = []
    if driver != VFIO_PCI:
        return causes
    denied = host.text_or_empty(f"{DEVICES}/{address}/device") in _DENYLIST
    if denied and host.text_or_empty("/sys/module/vfio_pci/parameters/disable_denylist") in parameter:
        causes.append("it is on vfio-pci's denylist; load the module with disable_denylist=1")
    unsafe = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"
    if not iommu_enabled(host) and host.text_or_empty(unsafe) in parameter:
        causes.append("no IOMMU is enabled; add intel_iommu=on to the kernel's command line")
    return causes


def _check(host: Host, address: str, before: str, driver: str) -> None:
    """Raises `BindError` for a binding that would fail, before anything is written."""
    device = f"{DEVICES}/{address}"
    if not is_loaded(host, driver):
        raise BindError(device, f"the driver {driver} is not loaded, expected {DRIVERS}/{driver} (modprobe {driver})")
    if before == VFIO_PCI and vfio_group_is_open(host, address):
        raise BindError(device, f"in use: its VFIO group is open; it stays bound to {before}", errno.EBUSY)
    if certain := likely_causes(host, address, driver, ("N",)):
        raise BindError(device, f"cannot be bound to {driver}, skipped: {'; '.join(certain)}")


def _override(host: Host, device: str, driver: str) -> bool:
    """Writes `driver_override`; False if it cannot be written. Raises `BindError`."""
    try:
        host.write(f"{device}/driver_override", driver)
    except Missing:
        return False
    except WriteError as error:
        if error.errno in _NOT_WRITABLE:
            return False
        raise BindError(device, f"{error.problem} to driver_override", error.errno) from None
    return True


def _bind_by_id(host: Host, device: str, address: str, driver: str) -> None:
    """Raises `HostError`."""
    ids = " ".join(host.text(f"{device}/{attribute}").removeprefix("0x") for attribute in ("vendor", "device"))
    added = True
    try:
        host.write(f"{DRIVERS}/{driver}/new_id", ids)
    except HostError as error:
        if error.errno != errno.EEXIST:
            raise
        added = False
    try:
        if driver_of(host, address) != driver:
            host.write(f"{DRIVERS}/{driver}/bind", address)
    finally:
        if added:
            with contextlib.suppress(HostError):
                host.write(f"{DRIVERS}/{driver}/remove_id", ids)
