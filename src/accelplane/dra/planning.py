"""Decisions about a claim, without side effects: its devices with units and configuration, conflicts, variables."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from accelplane.devices import Allocation, Unit
from accelplane.dra import cdi
from accelplane.dra.catalog import label_value
from accelplane.dra.claims import Allocated, Claim, Result
from accelplane.dra.configuration import KINDS, DeviceConfig, for_request, parsed
from accelplane.dra.hardware import ClaimDevice, variables
from accelplane.dra.journal import Damaged, Entry, Holding, Rebind, UndoStep
from accelplane.dra.model import ClaimError, DeviceName, Offer, Offers, overlap
from accelplane.host import pci_address

_REPLACE = "delete the pod to get another device"
_MAX_REASON = 120

Allocate = Callable[[Sequence[str]], Awaitable[Allocation]]


class Node(Struct, frozen=True, kw_only=True):
    """What a decision depends on: the driver, the pool of this node, the names of devices and the offered units."""

    driver: str
    pool: str
    names: Mapping[str, DeviceName]
    offers: Mapping[str, Offer]


class Conflict(NamedTuple):
    """A device of a claim whose unit another claim holds, and the entry of that claim."""

    wanted: Holding
    holder: Entry


def results_of(node: Node, claim: Claim) -> Sequence[Result]:
    """The devices of the claim that this driver has on this node. Raises `ClaimError` if there are none."""
    allocation = claim.status.allocation or Allocated()
    found = [each for each in allocation.results if each.driver == node.driver and each.pool == node.pool]
    if not found:
        raise ClaimError(f"the claim has no device of {node.driver} in the pool {node.pool}")
    return found


def claim_devices(node: Node, uid: str, claim: Claim) -> list[ClaimDevice]:
    """The devices of an allocated claim, all of them checked. Raises `ClaimError`."""
    allocation = claim.status.allocation or Allocated()
    results = results_of(node, claim)
    kind = KINDS.get(node.driver)
    if kind is None:
        parsed(node.driver, allocation.config)
    requests = list(dict.fromkeys(each.main_request for each in results))
    devices: list[ClaimDevice] = []
    for result in results:
        config = DeviceConfig()
        if kind is not None:
            device_class = claim.class_of(result.request)
            config = for_request(node.driver, result.request, device_class, allocation.config, kind)
        device = _device(node, uid, result, config, requests.index(result.main_request))
        if other := next((each for each in devices if _conflicts(each.holding, device.holding)), None):
            raise ClaimError(
                f"devices {other.holding.device} and {result.device} of the claim are of one unit; {_REPLACE}"
            )
        devices.append(device)
    return devices


def conflict(entry: Entry, entries: Iterable[Entry]) -> Conflict | None:
    """A device of the claim whose unit another claim holds, and that claim."""
    for wanted in entry.devices:
        for other in entries:
            if other.uid != entry.uid and any(_conflicts(wanted, held) for held in other.devices):
                return Conflict(wanted, other)
    return None


def damaged_unit(entry: Entry, damaged: Iterable[Damaged]) -> tuple[Holding, Damaged] | None:
    """A device of the claim whose unit is in a damaged file of another claim, and that file."""
    for file in damaged:
        for wanted in entry.devices:
            if file.uid != entry.uid and not wanted.admin and wanted.unit in file.units:
                return wanted, file
    return None


def function_holders(uid: str, entries: Iterable[Entry], offers: Mapping[str, Offer]) -> dict[str, str]:
    """The claims and containers that hold PCI functions, by address, without the claim itself."""
    found: dict[str, str] = {}
    for unit, offer in offers.items():
        if offer.containers:
            found[unit.partition("-")[0]] = f"container {offer.containers[0]}"
    for entry in entries:
        for held in entry.devices if entry.uid != uid else ():
            if not held.admin:
                found[held.unit.partition("-")[0]] = f"claim {entry.claim}"
    return {address: holder for address, holder in found.items() if pci_address(address)}


def differs(entry: Entry, devices: Sequence[ClaimDevice]) -> bool:
    """Whether the claim has other devices than the entry: it was allocated again."""
    before = {(each.request, each.pool, each.device, each.share_id, each.admin) for each in entry.devices}
    now = [device.holding for device in devices]
    return before != {(each.request, each.pool, each.device, each.share_id, each.admin) for each in now}


def holdings(devices: Iterable[ClaimDevice], before: Entry | None) -> list[Holding]:
    """What the claim holds, with the CDI names that its devices have inherited."""
    inherited = {each.device: each.inherited for each in before.devices} if before is not None else {}
    return [replace(device.holding, inherited=inherited.get(device.holding.device, ())) for device in devices]


def bound_units(devices: Iterable[ClaimDevice], undo: Iterable[UndoStep]) -> list[Unit]:
    """The units whose functions get a VFIO driver, with that driver as attribute."""
    drivers = {step.address: step.bound for step in undo if isinstance(step, Rebind)}
    return [
        replace(device.unit, attributes={**device.unit.attributes, "driver": drivers[device.address]})
        for device in devices
        if device.vfio and device.address in drivers
    ]


def used_config(devices: Iterable[ClaimDevice]) -> list[Mapping[str, object]]:
    """The configuration of each device as it is recorded."""
    return [{"device": device.holding.device, **to_builtins(device.config)} for device in devices]


async def allocations(
    devices: Sequence[ClaimDevice], uid: str, offers: Offers
) -> tuple[Mapping[str, cdi.Edits], Sequence[Mapping[str, str]]]:
    """What the plugin gives containers with the devices, by device, and the variables of each request.

    The hooks of the plugin are called once for the same units. Raises `AllocationError`.
    """
    known: dict[Sequence[str], Allocation] = {}

    async def allocate(units: Sequence[str]) -> Allocation:
        key = tuple(units)
        if key not in known:
            known[key] = await offers.allocation(key)
        return known[key]

    edits = {
        each.holding.device: plugin_edits(offers, await allocate((each.unit.id,))) if each.from_plugin else cdi.Edits()
        for each in devices
    }
    return edits, await request_variables(devices, uid, allocate)


def plugin_edits(offers: Offers, found: Allocation) -> cdi.Edits:
    """The files of an allocation."""
    return cdi.edits(found.nodes, found.mounts, offers.cdi_devices(found.cdi_devices))


async def request_variables(devices: Sequence[ClaimDevice], uid: str, allocate: Allocate) -> list[dict[str, str]]:
    """The variables of each request, in the order of the requests.

    Variables that the plugin numbers (`QAT0`) are numbered through the claim. Others have the value for the devices of
    their request. Raises what `allocate` raises.
    """
    requests: dict[str, list[ClaimDevice]] = {}
    for device in devices:
        requests.setdefault(device.holding.request, []).append(device)
    found: list[dict[str, str]] = []
    before: Mapping[str, str] = {}
    units: dict[str, None] = {}
    number = 0
    for members in requests.values():
        own = list(dict.fromkeys(device.unit.id for device in members if device.from_plugin))
        alone: Mapping[str, str] = (await allocate(own)).envs if own else {}
        first = not units
        units.update(dict.fromkeys(own))
        total = alone if first or not own else (await allocate(list(units))).envs
        envs = {name: value for name, value in total.items() if name not in before or alone.get(name) == value}
        envs.update(
            {name: value for name, value in alone.items() if name in before and total.get(name) != before[name]}
        )
        before = total
        for device in members:
            address = device.unit.text("pciAddress") or device.unit.id
            envs[cdi.unique_variable(device.driver, uid, number)] = address
            number += 1
        found.append({**envs, **variables(members)})
    return found


def _device(node: Node, uid: str, result: Result, config: DeviceConfig, request: int) -> ClaimDevice:
    """One allocated device. Raises `ClaimError` if it cannot be used."""
    name = node.names.get(result.device)
    offer = node.offers.get(name.unit) if name is not None else None
    admin = bool(result.admin_access)
    if name is None or offer is None or offer.state == "gone":
        raise ClaimError(f"device {result.device} is no longer on this node; {_REPLACE}")
    share = result.share_id or ""
    holding = Holding(
        request=result.main_request, pool=result.pool, device=result.device, unit=name.unit,
        lock=offer.unit.parent or name.unit, slot=share if name.multiple and share else name.slot, share_id=share,
        admin=admin,
    )  # fmt: skip
    device = ClaimDevice(driver=node.driver, holding=holding, unit=offer.unit, config=config, tile=name.tile)
    if device.vfio:
        device = replace(device, holding=replace(holding, slot=""))  # VFIO takes the complete function
    _check_offer(node, result, offer, vfio=device.vfio)
    names = (
        f"{cdi.kind(node.driver)}={cdi.device_name(uid, result.device, share, admin=admin)}",
        f"{cdi.kind(node.driver)}={cdi.request_name(uid, request)}",
    )
    return replace(device, holding=replace(device.holding, cdi_ids=names))


def _check_offer(node: Node, result: Result, offer: Offer, *, vfio: bool) -> None:
    """Raises `ClaimError` if the unit is not offered by DRA, is held by a container, or is not healthy."""
    device = result.device
    # A remedy must not be cut off behind a long reason.
    reason = (offer.text or offer.reason or "no reason given")[:_MAX_REASON]
    if offer.owner == "plugin":
        raise ClaimError(f"device {device} is owned by the device plugin on this node, expected DRA; {_REPLACE}")
    if offer.owner != "dra":
        raise ClaimError(f"device {device} is not offered while its owner changes on this node; wait, or {_REPLACE}")
    if result.admin_access:
        return
    for other in node.offers.values():
        if other.containers and overlap(other.unit, offer.unit):
            holder = f"container {other.containers[0]} of the device plugin"
            raise ClaimError(f"device {device} is still held by {holder}, waiting for its end")
    if offer.state == "cleanup" or (offer.state == "unbound" and not vfio):
        raise ClaimError(f"device {device} cannot be used, its state is {offer.state}: {reason}; {_REPLACE}")
    if offer.state in ("unhealthy", "recovering") and not result.tolerates(
        f"{node.driver}/health", label_value(offer.reason)
    ):
        raise ClaimError(f"device {device} is not healthy: {reason}; {_REPLACE}")


def _conflicts(wanted: Holding, held: Holding) -> bool:
    if wanted.admin or held.admin:
        return False
    if wanted.unit == held.unit:
        return not wanted.slot or not held.slot or wanted.slot == held.slot
    # A function as a whole, and a part of it.
    return wanted.unit == held.lock or held.unit == wanted.lock
