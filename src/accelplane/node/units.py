"""Units from the devices of a scan: the one description of hardware, for `inspect`, metrics and later publishers.

Units are made when they are needed, not by each scan: that reads several files of each PCI function. Facts: kernel
document Documentation/ABI/testing/sysfs-bus-pci; Kubernetes' standard attributes of devices.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import UnsetType
from msgspec.structs import replace

from accelplane.devices import Attribute, Device, Unit, UnitNode
from accelplane.devices.unit import text_of
from accelplane.host import Host, HostError
from accelplane.host.pci import DEVICES
from accelplane.host.pcinames import product_name
from accelplane.readings import DevicePlan

STANDARD = "resource.kubernetes.io/"

_ROOT = re.compile(r"/sys/devices/(pci[0-9a-f]{4}:[0-9a-f]{2})/")
_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
# Attributes of devices that have another name in units. Names have letters and digits, as in `deviceId`.
_RENAMED = {"bdf": "pciAddress", "device-id": "pciId", "product": "model"}
_WORD_START = re.compile(r"[^A-Za-z0-9]+([A-Za-z0-9])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
# The labels of `accelplane_device_info`, with their attributes.
_LABELS = {"driver": "driver", "model": "model", "pci_id": "pciId", "kind": "kind", "function": "function"}


class _Function(NamedTuple):
    """The PCI function of a unit: its address and directory, empty if there is none or it is not visible."""

    address: str = ""
    path: str = ""


def units_of(host: Host, devices: Iterable[Device]) -> list[Unit]:
    """The units of the devices, in the order of their first device."""
    members: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.path is not None:
            members.setdefault((device.path or device.unit, device.part), []).append(device)
    found = [(same, function) for same in members.values() if (function := _function(host, same[0])) is not None]
    numbers = Counter(function.address for _same, function in found)
    return [_unit(host, same, function, alone=numbers[function.address] == 1) for same, function in found]


def describe(
    host: Host, path: str, known: Mapping[str, Attribute], topology: Sequence[int] | None
) -> dict[str, Attribute]:
    """The attributes of the PCI function in the directory `path`, if there is one, with those `known` of a device.

    Those of the function are present even if they are empty.
    """
    named = {_RENAMED.get(name) or _WORD_START.sub(lambda word: word[1].upper(), name): known[name] for name in known}
    attributes = {name: value for name, value in named.items() if _NAME.fullmatch(name)}
    if topology and len(topology) == 1:
        attributes[f"{STANDARD}numaNode"] = topology[0]
    if not path:
        return attributes
    address, vendor = os.path.basename(path), host.text_or_empty(f"{path}/vendor")
    pci_id = host.text_or_empty(f"{path}/device").partition("\n")[0].lower() or attributes.get("pciId", "")
    attributes["pciAddress"], attributes["pciId"] = address, pci_id
    if "product" not in known:
        attributes["model"] = product_name(vendor, str(pci_id)) or attributes.get("model", "")
    attributes.setdefault("driver", host.driver_or_empty(path))
    if _BUS_ID.fullmatch(address):
        attributes[f"{STANDARD}pciBusID"] = address
    if root := _ROOT.search(path):
        attributes[f"{STANDARD}pcieRoot"] = root[1]
    return attributes


def complete(host: Host, plans: Iterable[DevicePlan], devices: Iterable[Device]) -> Iterator[DevicePlan]:
    """The plans with the address and the facts of their physical devices. What a plan has of them is kept."""
    by_unit = {device.unit: device for device in devices}
    for plan in plans:
        device = next((by_unit[unit] for unit in plan.units if unit in by_unit), None)
        path = ""
        if stated := plan.path or (f"{DEVICES}/{plan.bdf}" if plan.bdf else ""):
            with suppress(HostError):
                path = host.function_of(stated)
        elif device is not None and device.path is not None:
            path = (_function(host, device) or _Function()).path
        known: Mapping[str, Attribute] = device.attributes if device is not None else {}
        if not path and not known:
            yield plan
            continue
        topology = host.topology_of(path) if path else None
        attributes = describe(host, path, known, topology)
        facts = {label: text_of(attributes, name) for label, name in _LABELS.items()}
        # It may have several numbers, unlike the attribute.
        facts["numa_node"] = ",".join(map(str, topology or ()))
        bdf = plan.bdf or text_of(attributes, f"{STANDARD}pciBusID")
        yield replace(plan, bdf=bdf, facts={**facts, **plan.facts})


def function_address(host: Host, device: Device) -> str:
    """The PCI address of the function of a device, empty if it has none or several, or it is not visible."""
    return (_function(host, device) or _Function()).address if device.path is not None else ""


def _unit(host: Host, same: Sequence[Device], function: _Function, *, alone: bool) -> Unit:
    """The unit of devices with the same hardware; `alone` if it is the only one of its function."""
    device = same[0]
    ids: dict[str, list[str]] = {}
    for each in same:
        ids.setdefault(each.resource, []).append(each.id)
    part = device.part or ("" if alone else device.unit)
    topology = None if isinstance(device.topology, UnsetType) else device.topology
    attributes = describe(host, function.path, device.attributes, topology)
    if function.address:
        attributes["pciAddress"] = function.address
    return Unit(
        id="-".join(filter(None, (function.address, part))) or device.unit,
        parent=function.address if part else _physical_function(host, function.path),
        health=device.unit,
        ids=ids,
        attributes=attributes,
        capacities=device.capacities,
        nodes=[_node(host, node.host_path, node.permissions) for node in device.nodes],
    )


def _function(host: Host, device: Device) -> _Function | None:
    """The PCI function of a device, None if its nodes are of several."""
    if device.path:
        with suppress(HostError):
            if path := host.function_of(device.path):
                return _Function(os.path.basename(path), path)
    found: set[str] = set()
    for node in device.nodes if not device.path else ():
        with suppress(HostError):
            found.add(host.function_of(host.device_of_node(node.host_path)))
    if len(found) > 1:
        return None
    path = next(iter(found), "")
    return _Function(os.path.basename(path) or device.text("bdf"), path)


def _physical_function(host: Host, path: str) -> str:
    """The address of the physical function of a virtual one, else empty."""
    link = f"{path}/physfn"
    with suppress(HostError):
        if path and host.exists(link):
            return os.path.basename(host.resolve(link))
    return ""


def _node(host: Host, path: str, permissions: str) -> UnitNode:
    with suppress(HostError):
        status = host.status(path)
        if status is not None and (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
            return UnitNode(path, kind, os.major(status.st_rdev), os.minor(status.st_rdev), permissions)
    return UnitNode(path, permissions=permissions)
