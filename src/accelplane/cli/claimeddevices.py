"""The units behind the devices that containers have by claims (DRA)."""

from collections.abc import Collection, Iterable, Mapping

from accelplane.devices import Unit
from accelplane.kubelet.podresources import ClaimHolder

DeviceKey = tuple[str, str, str]  # driver, pool and name


def claimed_devices(claims: Iterable[ClaimHolder], driver: str, units: Collection[Unit]) -> Mapping[DeviceKey, Unit]:
    """The unit of each claimed device of a driver."""
    keys = {(each.driver, each.pool, each.device) for each in claims if each.driver == driver}
    if not keys:
        return {}
    from accelplane.dra.catalog import device_names  # noqa: PLC0415 - memory and time of nodes without claims
    from accelplane.dra.model import Offer  # noqa: PLC0415 - as above

    offers = {
        unit.id: Offer(unit=unit, owner="dra", shares=max(map(len, unit.ids.values()), default=1)) for unit in units
    }
    names = device_names(driver, offers)
    return {key: offers[names[key[2]].unit].unit for key in keys if key[2] in names}
