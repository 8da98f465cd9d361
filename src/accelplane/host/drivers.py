"""Which driver a PCI function is bound to, and binding it to another one.

Facts: Documentation/ABI/testing/sysfs-bus-pci (bind, unbind, new_id, driver_override) and Documentation/driver-api/
vfio.rst. A driver takes a function when asked to `bind` it, provided that it knows its id or that `driver_override`
names it; vfio-pci knows no ids by itself.
"""

import errno
import os
from typing import TYPE_CHECKING

from accelplane.host import files

if TYPE_CHECKING:
    from accelplane.host.files import Host

VFIO_PCI = "vfio-pci"

_DEVICES = "/sys/bus/pci/devices"
_DRIVERS = "/sys/bus/pci/drivers"
# What a container with the host's sysfs mounted read-only gets.
_NOT_WRITABLE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
# Functions that vfio-pci refuses since Linux 5.9 (drivers/vfio/pci/vfio_pci.c, vfio_pci_dev_in_denylist).
_DENYLIST = frozenset(
    f"0x{number}"
    for number in (
        "0434",
        "0435",
        "0442",
        "0443",
        "18a0",
        "18a1",
        "19e2",
        "19e3",
        "37c8",
        "37c9",
        "6f54",
        "6f55",
        "0b25",
    )
)


class BindError(files.HostError):
    """A function could not be given to a driver; the message says what to do about it."""


def driver_of(host: "Host", address: str) -> str:
    """The name of the driver that has the function, empty when none has."""
    try:
        return host.driver(f"{_DEVICES}/{address}")
    except files.HostError:
        return ""


def bind(host: "Host", address: str, driver: str, *, new_id: bool = False) -> None:
    """Gives the function to `driver`, taking it from the one that has it. Nothing happens when it is there already.

    With `new_id`, where the function's `driver_override` cannot be written, the driver is told its id instead, for as
    long as it takes to bind it; it then takes every unbound function of that id as well.
    Raises `BindError`; the function then is with the driver that it had before, if that takes it back.
    """
    before = driver_of(host, address)
    if before == driver:
        return
    device = f"{_DEVICES}/{address}"
    if not host.exists(f"{_DRIVERS}/{driver}"):
        raise BindError(device, f"the driver {driver} is not loaded, expected {_DRIVERS}/{driver} (modprobe {driver})")
    if before == VFIO_PCI and vfio_group_is_open(host, address):
        raise BindError(device, f"in use: its VFIO group is open, it stays with {before}", errno.EBUSY)
    override = _override(host, device, driver)
    try:
        if before:
            host.write(f"{_DRIVERS}/{before}/unbind", address)
        try:
            host.write(f"{_DRIVERS}/{driver}/bind", address)
        except files.HostError as error:
            if override or not new_id or error.errno != errno.ENODEV:
                raise
            _bind_by_id(host, device, address, driver)
    except files.HostError as error:
        if override:
            _try(host, f"{device}/driver_override", "\n")
        if before and not driver_of(host, address):
            _try(host, f"{_DRIVERS}/{before}/bind", address)
        raise BindError(
            device, f"cannot be bound to {driver}: {_diagnosis(host, device, driver, error)}", error.errno
        ) from None


def vfio_group(host: "Host", address: str) -> str:
    """The name of the function's node below `/dev/vfio`. Raises `Missing` when it has no IOMMU group, `Unreadable`."""
    group = host.link(f"{_DEVICES}/{address}/iommu_group").rstrip("/").rpartition("/")[2]
    try:
        name = host.text(f"{_DEVICES}/{address}/iommu_group/name")
    except files.HostError:
        name = ""
    return f"noiommu-{group}" if name == "vfio-noiommu" else group


def vfio_group_is_open(host: "Host", address: str) -> bool:
    """Whether somebody has the function's VFIO group open; nobody else can open it then."""
    try:
        path = host.local(f"/dev/vfio/{vfio_group(host, address)}")
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.EBUSY
    except files.HostError:
        return False
    return False


def iommu_is_on(host: "Host") -> bool:
    """Whether the kernel uses an IOMMU."""
    try:
        return bool(host.names("/sys/class/iommu"))
    except files.HostError:
        return False


def _override(host: "Host", device: str, driver: str) -> bool:
    """Whether the function could be told to take no other driver."""
    try:
        host.write(f"{device}/driver_override", driver)
    except files.Missing:
        return False
    except files.Refused as error:
        if error.errno in _NOT_WRITABLE:
            return False
        raise BindError(device, f"{error.problem} to driver_override", error.errno) from None
    return True


def _bind_by_id(host: "Host", device: str, address: str, driver: str) -> None:
    ids = f"{_id(host, device, 'vendor')} {_id(host, device, 'device')}"
    try:
        host.write(f"{_DRIVERS}/{driver}/new_id", ids)
    except files.HostError as error:
        if error.errno != errno.EEXIST:
            raise
    try:
        if driver_of(host, address) != driver:
            host.write(f"{_DRIVERS}/{driver}/bind", address)
    finally:
        _try(host, f"{_DRIVERS}/{driver}/remove_id", ids)


def _id(host: "Host", device: str, attribute: str) -> str:
    return host.text(f"{device}/{attribute}").removeprefix("0x")


def _try(host: "Host", path: str, text: str) -> None:
    try:
        host.write(path, text)
    except files.HostError as error:
        host.note(f"while undoing: {error}")


def _diagnosis(host: "Host", device: str, driver: str, error: files.HostError) -> str:
    """What the kernel answered, and what that probably means."""
    reasons: list[str] = []
    if driver == VFIO_PCI:
        try:
            if host.text(f"{device}/device") in _DENYLIST:
                reasons.append("it is on vfio-pci's denylist, which disable_denylist=1 of that module lifts")
        except files.HostError:
            pass
        if not iommu_is_on(host):
            reasons.append("no IOMMU is in use (intel_iommu=on on the kernel's command line)")
    return "; ".join((str(error), *reasons))
