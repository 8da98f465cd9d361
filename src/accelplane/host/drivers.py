"""Which driver a PCI function is bound to, and binding it to another one.

Facts: Documentation/ABI/testing/sysfs-bus-pci (bind, unbind, new_id, driver_override) and Documentation/driver-api/
vfio.rst. A driver takes a function when asked to `bind` it, provided that it knows its id or that `driver_override`
names it; vfio-pci knows no ids by itself.
"""

import errno
import os
import re
from collections.abc import Sequence

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError
from accelplane.host.host import Host

VFIO_PCI = "vfio-pci"

_DEVICES = "/sys/bus/pci/devices"
_DRIVERS = "/sys/bus/pci/drivers"
# What a container with the host's sysfs mounted read-only gets.
_NOT_WRITABLE = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
# Functions that vfio-pci refuses since Linux 5.9 (drivers/vfio/pci/vfio_pci.c, vfio_pci_dev_in_denylist).
_DENYLIST = frozenset(("0x0435", "0x0443", "0x19e2", "0x19e3", "0x37c8", "0x37c9", "0x0b25", "0x0cfe"))
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class BindError(HostError):
    """A function could not be given to a driver; the message says what to do about it.

    `tried` tells whether it was taken from its driver for the attempt, of which uevents tell everybody.
    """

    def __init__(self, path: str, problem: str, errno: int = 0, *, tried: bool = False) -> None:
        super().__init__(path, problem, errno)
        self.tried = tried


def driver_of(host: Host, address: str) -> str:
    """The name of the driver that has the function, empty when none has."""
    try:
        return host.driver(f"{_DEVICES}/{address}")
    except HostError:
        return ""


def bind(host: Host, address: str, driver: str, *, new_id: bool = False) -> None:
    """Gives the function to `driver`, taking it from the one that has it. Nothing happens when it is there already.

    With `new_id`, where the function's `driver_override` cannot be written, the driver is told its id instead, for as
    long as it takes to bind it; it then takes every unbound function of that id as well.
    Raises `BindError`; the function then is with the driver that it had before, if that takes it back.
    """
    before = driver_of(host, address)
    if before == driver:
        return
    _check(host, address, before, driver)
    device = f"{_DEVICES}/{address}"
    previous = _override_of(host, device)
    override = _override(host, device, driver)
    try:
        if before:
            host.write(f"{_DRIVERS}/{before}/unbind", address)
        try:
            host.write(f"{_DRIVERS}/{driver}/bind", address)
        except HostError as error:
            if override or not new_id or error.errno != errno.ENODEV:
                raise
            _bind_by_id(host, device, address, driver)
    except HostError as error:
        now = driver_of(host, address)
        if now == driver:
            return  # somebody else was quicker, such as udev with a module that came just then
        if override:
            _try(host, f"{device}/driver_override", previous or "\n")
        if before and not now:
            _try(host, f"{_DRIVERS}/{before}/bind", address)
        likely = likely_obstacles(host, address, driver)
        if not override:
            likely.append("its driver_override could not be written")
        problem = "; ".join((str(error), *likely))
        raise BindError(device, f"cannot be bound to {driver}: {problem}", error.errno, tried=True) from None


def foreseen(host: Host, address: str, driver: str) -> str:
    """Why `bind` would not even try; empty when it would, or has nothing to do. Nothing is written."""
    before = driver_of(host, address)
    try:
        if before != driver:
            _check(host, address, before, driver)
    except BindError as error:
        return str(error)
    return ""


def vfio_group(host: Host, address: str) -> str:
    """The name of the function's node below `/dev/vfio`. Raises `Missing` when it has no IOMMU group, `Unreadable`."""
    link = f"{_DEVICES}/{address}/iommu_group"
    group = host.link(link).rstrip("/").rpartition("/")[2]
    if not _GROUP.fullmatch(group):
        raise Unreadable(link, f"leads to {group[:40]!a}, expected a group's number")
    name = _text(host, f"{link}/name")
    return f"noiommu-{group}" if name == "vfio-noiommu" else group


def vfio_group_is_open(host: Host, address: str) -> bool:
    """Whether somebody has the function's VFIO group open; nobody else can open it then.

    Where this process may not try, it counts as open: unbinding one that is hangs in the kernel.
    """
    try:
        path = host.local(f"/dev/vfio/{vfio_group(host, address)}")
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.EBUSY, errno.EPERM, errno.EACCES)
    except HostError:
        return False
    return False


def iommu_is_on(host: Host) -> bool:
    """Whether the kernel uses an IOMMU."""
    try:
        return bool(host.names("/sys/class/iommu"))
    except HostError:
        return False


def likely_obstacles(host: Host, address: str, driver: str) -> list[str]:
    """What probably keeps the driver from taking the function, as far as that can be seen."""
    return _obstacles(host, address, driver, ("N", ""))


def _check(host: Host, address: str, before: str, driver: str) -> None:
    """Raises `BindError` for what is known to fail, so that it is not even tried."""
    device = f"{_DEVICES}/{address}"
    if not host.exists(f"{_DRIVERS}/{driver}"):
        raise BindError(device, f"the driver {driver} is not loaded, expected {_DRIVERS}/{driver} (modprobe {driver})")
    if before == VFIO_PCI and vfio_group_is_open(host, address):
        raise BindError(device, f"in use: its VFIO group is open, it stays with {before}", errno.EBUSY)
    certain = _obstacles(host, address, driver, ("N",))
    if certain:
        raise BindError(device, f"{driver} would not take it, so it was left alone: {'; '.join(certain)}")


def _obstacles(host: Host, address: str, driver: str, parameter: Sequence[str]) -> list[str]:
    """What keeps the driver from taking the function where the module's parameter that allows it has such a text."""
    reasons: list[str] = []
    if driver != VFIO_PCI:
        return reasons
    denied = _text(host, f"{_DEVICES}/{address}/device") in _DENYLIST
    if denied and _text(host, "/sys/module/vfio_pci/parameters/disable_denylist") in parameter:
        reasons.append("it is on vfio-pci's denylist, which disable_denylist=1 of that module lifts")
    if not iommu_is_on(host) and _text(host, "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode") in parameter:
        reasons.append("no IOMMU is in use (intel_iommu=on on the kernel's command line)")
    return reasons


def _override_of(host: Host, device: str) -> str:
    """The driver that the function is kept for, empty for none."""
    return _text(host, f"{device}/driver_override").replace("(null)", "")


def _override(host: Host, device: str, driver: str) -> bool:
    """Whether the function could be told to take no other driver."""
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
    ids = f"{_id(host, device, 'vendor')} {_id(host, device, 'device')}"
    told = True
    try:
        host.write(f"{_DRIVERS}/{driver}/new_id", ids)
    except HostError as error:
        if error.errno != errno.EEXIST:
            raise
        told = False
    try:
        if driver_of(host, address) != driver:
            host.write(f"{_DRIVERS}/{driver}/bind", address)
    finally:
        if told:
            _try(host, f"{_DRIVERS}/{driver}/remove_id", ids)


def _id(host: Host, device: str, attribute: str) -> str:
    return host.text(f"{device}/{attribute}").removeprefix("0x")


def _text(host: Host, path: str) -> str:
    """The file's text, empty when there is none to be read."""
    try:
        return host.text(path)
    except HostError:
        return ""


def _try(host: Host, path: str, text: str) -> None:
    try:
        host.write(path, text)
    except HostError as error:
        host.note(f"while undoing: {error}")
