"""The steps that give a PCI function to another driver, each with its way back.

Facts: Documentation/ABI/testing/sysfs-bus-pci. A function whose `driver_override` names a driver is taken by that one
only, also while udev is still loading the module that would otherwise take it: a function without a driver is told so
first, and bound once that has come to rest.
"""

from collections.abc import Iterator
from functools import partial

from accelplane.host import Host, HostError
from accelplane.host.drivers import driver_of, likely_obstacles
from accelplane.provision.steps import Step

_DEVICES = "/sys/bus/pci/devices"
_DRIVERS = "/sys/bus/pci/drivers"


def is_loaded(host: Host, driver: str) -> bool:
    """Whether the driver is there to be bound to."""
    return host.exists(f"{_DRIVERS}/{driver}")


def driver_override(host: Host, address: str) -> str:
    """The driver that the function is kept for, empty for none."""
    try:
        return host.text(f"{_DEVICES}/{address}/driver_override").replace("(null)", "")
    except HostError:
        return ""


def binding(host: Host, address: str, driver: str, what: str, *, part: str = "") -> Iterator[Step]:
    """What is to be written next so that `driver` has the function; nothing when it has."""
    before = driver_of(host, address)
    if before == driver:
        return
    device = f"{_DEVICES}/{address}"
    override = driver_override(host, address)
    if before:
        yield Step(
            what=what,
            path=f"{_DRIVERS}/{before}/unbind",
            text=address,
            undo=(f"{_DRIVERS}/{before}/bind", address),
            part=part,
        )
    if override != driver:
        yield Step(
            what=what,
            path=f"{device}/driver_override",
            text=driver,
            undo=(f"{device}/driver_override", override or "\n"),
            part=part,
        )
    if before or override == driver:
        yield Step(
            what=what,
            path=f"{_DRIVERS}/{driver}/bind",
            text=address,
            undo=(f"{_DRIVERS}/{driver}/unbind", address),
            part=part,
            explain=partial(_obstacles, address, driver),
        )


def _obstacles(address: str, driver: str, host: Host, _error: HostError) -> str:
    return "; ".join(likely_obstacles(host, address, driver))
