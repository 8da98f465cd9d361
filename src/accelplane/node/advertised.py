"""Pure functions that compute the devices to list. Times are monotonic seconds."""

from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Device, Inventory

Key = tuple[str, str]  # resource name without namespace, device ID

DEPARTED = "not found by the last scan"
WITHHELD = "handed out by another API"


class Departure(Struct, frozen=True):
    """When a device that was not found any more was first listed as Unhealthy, and until when it stays at least."""

    since: float
    until: float


Departures = Mapping[Key, Departure]


def with_health(found: Inventory, apply: Callable[[Device], Device] | None, outdated: str) -> Inventory:
    """The devices with their health; all Unhealthy if there is a reason why the scan is `outdated`."""
    if outdated:
        return found.with_devices(replace(device, health=UNHEALTHY, reason=outdated) for device in found)
    return found if apply is None else found.with_devices(map(apply, found))


def without(found: Inventory, withheld: Collection[Key]) -> Inventory:
    """The devices but those `withheld`. A resource that loses all its devices is left out."""
    resources = {
        resource: left
        for resource, devices in found.resources.items()
        if (left := {id_: devices[id_] for id_ in devices if (resource, id_) not in withheld}) or not devices
    }
    return replace(found, resources=resources)


def with_departed(
    present: Inventory,
    listed: Iterable[Device],
    departures: Departures,
    *,
    now: float,
    removal_delay: float,
    must_stay: Callable[[Device, Departure], bool],
    withheld: Collection[Key] = (),
) -> tuple[Inventory, Departures]:
    """Adds the devices that are `listed` and not present any more, as Unhealthy: for `removal_delay` seconds at least,
    and for as long as they `must_stay`. Those `withheld` are on the node, and stay only for as long as they must."""
    stay: list[Device] = []
    departed: dict[Key, Departure] = {}
    for device in listed:
        if device.id in present.resources.get(device.resource, {}):
            continue
        key = (device.resource, device.id)
        departure = departures.get(key) or Departure(now, now if key in withheld else now + removal_delay)
        if now < departure.until or must_stay(device, departure):
            departed[key] = departure
            reason = WITHHELD if key in withheld else DEPARTED
            stay.append(device if device.reason == reason else replace(device, health=UNHEALTHY, reason=reason))
    return present.with_devices(stay) if stay else present, departed
