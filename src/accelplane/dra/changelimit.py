"""A limit for changes of one unit, so that flapping health does not become a stream of writes."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from accelplane.dra.model import Pool, PoolDevice

INTERVAL = 10.0
# A timer may be early by the rounding of a sum.
_ROUNDING = 0.001

_Devices = Mapping[str, Sequence[PoolDevice]]


class ChangeLimit:
    """Allows one change of each unit in `interval` seconds. The first publication of a unit is no change."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._published: Pool | None = None
        self._devices: _Devices = {}
        self._changed_at: dict[str, float] = {}

    @property
    def units(self) -> frozenset[str]:
        """The IDs of the units in the published pool."""
        return frozenset(self._devices)

    def apply(self, pool: Pool, now: float) -> tuple[Pool, float | None]:
        """The pool with the published devices of units that changed recently, and when the first of them may change."""
        wanted = dict(_by_unit(pool))
        due: float | None = None
        if self._published is None:
            return pool, None
        sets = {**self._published.counter_sets, **pool.counter_sets}
        kept = False
        for unit, changed_at in self._changed_at.items():
            time = changed_at + self._interval
            if time - now <= _ROUNDING or wanted.get(unit) == self._devices.get(unit):
                continue
            kept, due = True, time if due is None else min(due, time)
            if unit in self._devices:
                wanted[unit] = self._devices[unit]
            else:
                del wanted[unit]
        if not kept:
            return pool, None
        devices = [device for each in wanted.values() for device in each]
        names = {name for device in devices for name in device.counters}
        return replace(pool, devices=devices, counter_sets={name: sets[name] for name in sets if name in names}), due

    def record(self, pool: Pool, now: float) -> None:
        """Called when the pool is published."""
        devices = _by_unit(pool)
        self._changed_at = {
            unit: time for unit, time in self._changed_at.items() if time + self._interval - now > _ROUNDING
        }
        if self._published is not None:
            for unit in {*devices, *self._devices}:
                is_first = unit not in self._devices and unit not in self._changed_at
                if devices.get(unit) != self._devices.get(unit) and not is_first:
                    self._changed_at[unit] = now
        self._published, self._devices = pool, devices


def _by_unit(pool: Pool) -> _Devices:
    devices: dict[str, list[PoolDevice]] = {}
    for device in pool.devices:
        devices.setdefault(device.unit, []).append(device)
    return devices
