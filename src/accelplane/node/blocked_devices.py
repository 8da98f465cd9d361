"""The devices of the last scan whose files block: the next scan is made without them and gets them back here."""

import itertools
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Device, Inventory, Skipped
from accelplane.host import Host, HostError, pci_address
from accelplane.host.operations import device_of
from accelplane.host.pci import DEVICES


class _Physical(Struct, frozen=True):
    """What a device ID stands for: `known` physical devices, of which some are `blocked`. `lost`: it is unusable."""

    known: bool
    blocked: frozenset[str]
    lost: bool


def keep_blocked(host: Host, found: Inventory, before: Inventory, problem: Callable[[str], str]) -> Inventory:
    """The devices that were found with `host`, and from the inventory `before` those that it omitted.

    `problem` returns why a blocked device is unhealthy, empty if it is not yet. A device ID that stands for several
    physical devices of which some are blocked keeps its health. A device ID whose physical device is not known is kept
    if it was not found. After an interrupted scan, so is each device that still exists.
    """
    if not host.missed:
        return found
    missed = frozenset(device for device in host.missed if not _removed(host, device))
    kept: list[Device] = []
    covered: set[str] = set()
    for device in before:
        physical = _physical(host, device, missed)
        present = found.resources.get(device.resource, {}).get(device.id)
        may_exist = (host.interrupted or not physical.known) and not _is_gone(host, device)
        if not physical.blocked and (present is not None or not may_exist):
            continue
        if present is not None and (facts := _facts(host, present)) and facts.isdisjoint(_facts(host, device) | missed):
            continue  # the ID of another device
        covered |= physical.blocked
        reasons = [problem(each) for each in sorted(physical.blocked)] if physical.lost else []
        reason = next(filter(None, reasons), "")
        kept.append(replace(device, health=UNHEALTHY, reason=reason) if reason else device)
    skipped = [Skipped(device, _reason(host, device), warning=True) for device in sorted(missed - covered)]
    usable = {
        resource: {id_: device for id_, device in devices.items() if not _physical(host, device, missed).lost}
        for resource, devices in found.resources.items()
    }
    return Inventory(usable, (*found.skipped, *skipped)).with_devices(kept)


def _physical(host: Host, device: Device, missed: frozenset[str]) -> _Physical:
    """PCI addresses in the facts of a device ID identify it. Otherwise its nodes do."""
    if facts := _facts(host, device):
        return _Physical(True, facts & missed, bool(facts & missed))
    behind: set[str] = set()
    for node in device.nodes:
        with suppress(HostError):
            behind.add(device_of(f"{host.device_of_node(node.host_path)}/dev"))
    # Nodes that several devices share have no PCI address, such as that of a driver.
    relevant = set(filter(pci_address, behind)) or behind
    blocked = {each: frozenset(key for key in missed if _is_part(key, each)) for each in relevant}
    together = frozenset(itertools.chain.from_iterable(blocked.values()))
    return _Physical(bool(relevant), together, bool(blocked) and all(blocked.values()))


def _facts(host: Host, device: Device) -> frozenset[str]:
    """The PCI addresses in the facts of a device ID, else that of its directory in sysfs."""
    if named := frozenset(filter(pci_address, (device.id, device.unit, device.text("bdf")))):
        return named
    with suppress(HostError):
        if device.path and pci_address(function := device_of(f"{host.resolve(device.path)}/dev")):
            return frozenset((function,))
    return frozenset()


def _is_part(blocked: str, device: str) -> bool:
    """Whether one of two devices, as `device_of` names them, is the other one or a part of it."""
    if not (blocked.startswith("/") and device.startswith("/")):
        return blocked == device
    return f"{blocked}/".startswith(f"{device}/") or f"{device}/".startswith(f"{blocked}/")


def _is_gone(host: Host, device: Device) -> bool:
    """Whether the functions of a device, its directory, or all of its nodes do not exist."""
    if any(_removed(host, function) for function in _facts(host, device)):
        return True
    places = [[device.path]] if device.path else []
    places += [[node.host_path for node in device.nodes]] if device.nodes else []
    return any(not any(map(host.exists, paths)) for paths in places)


def _reason(host: Host, device: str) -> str:
    blocked = host.blocked.get(device)  # it may answer by now
    return f"{blocked.path} does not answer" if blocked is not None else "a file of it did not answer"


def _removed(host: Host, device: str) -> bool:
    return bool(pci_address(device)) and host.exists(DEVICES) and not host.exists(f"{DEVICES}/{device}")
