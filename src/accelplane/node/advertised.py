"""Pure functions that compute the devices to list. Times are monotonic seconds."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from accelplane.devices import UNHEALTHY, Device, Inventory

Key = tuple[str, str]  # resource name without namespace, device ID

DEPARTED = "not found by the last scan"


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


def with_departed(
    present: Inventory,
    listed: Iterable[Device],
    departures: Departures,
    *,
    now: float,
    removal_delay: float,
    must_stay: Callable[[Device, Departure], bool],
) -> tuple[Inventory, Departures]:
    """Adds the devices that are `listed` and not present any more, as Unhealthy: for `removal_delay` seconds at least,
    and for as long as they `must_stay`."""
    stay: list[Device] = []
    departed: dict[Key, Departure] = {}
    for device in listed:
        if device.id in present.resources.get(device.resource, {}):
            continue
        key = (device.resource, device.id)
        departure = departures.get(key) or Departure(now, now + removal_delay)
        if now < departure.until or must_stay(device, departure):
            departed[key] = departure
            stay.append(device if key in departures else replace(device, health=UNHEALTHY, reason=DEPARTED))
    return present.with_devices(stay) if stay else present, departed
