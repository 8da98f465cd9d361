"""The use of all devices: the last values, and those of the last hour in memory.

A device takes about 1.2 KB. Of more than `MAX_DEVICES` devices, the use of the others is not known.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from accelplane.readings.use import Counters, Rates, Use, counters, rates, use_of
from accelplane.report.inventory import ReportedUnit
from accelplane.report.readings import DeviceReadings

from .model import NodeReadings

MAX_DEVICES = 50_000
MINUTES = 60
# Of 5,000 nodes each one is read every 250 s.
_EXPIRY = 900.0
_NONE = 0xFFFF
# The quantities of the history, and what 1 is in memory: a thousandth, 16 MiB, a tenth of a watt.
_SCALES: Mapping[str, float] = {"busy": 0.001, "memory": 2.0**24, "power": 0.1}
UNKNOWN = Use()


class _Device(Struct, gc=False):
    counters: Counters
    time: float
    use: Use = UNKNOWN
    rates: Rates = Rates()
    minute: int = 0
    history: "array[int] | None" = None


class UseHistory:
    """The use of devices by node, from their readings in the order of time."""

    def __init__(self, max_devices: int = MAX_DEVICES) -> None:
        self._nodes: dict[str, dict[tuple[str, str], _Device]] = {}
        self._max_devices = max_devices
        self.size = 0

    def add(self, node: str, found: NodeReadings, now: float) -> None:
        """Takes over the readings of a node. `found.time` is the clock of the node, `now` that of this process."""
        for reading in found.devices:
            self._add(self._nodes.setdefault(node, {}), reading, found.time, now)

    def retain(self, nodes: Iterable[str]) -> None:
        """Forgets all nodes but these."""
        for name in self._nodes.keys() - set(nodes):
            self.size -= len(self._nodes.pop(name))

    def of(self, node: str, unit: ReportedUnit, now: float) -> Use:
        """The last use of a device; without values if there is none of the last 15 minutes."""
        found = self._find(node, unit)
        return found.use if found is not None and now - found.time < _EXPIRY else UNKNOWN

    def history(self, node: str, unit: ReportedUnit, quantity: str, now: float) -> Sequence[float | None]:
        """One value for each of the last 60 minutes, the oldest one first. `quantity`: busy, memory or power."""
        found = self._find(node, unit)
        if found is None or found.history is None:
            return ()
        first, current = list(_SCALES).index(quantity) * MINUTES, int(now // 60)
        return [
            None
            if minute > found.minute or (stored := found.history[first + minute % MINUTES]) == _NONE
            else stored * _SCALES[quantity]
            for minute in range(max(current, found.minute) - MINUTES + 1, max(current, found.minute) + 1)
        ]

    def _find(self, node: str, unit: ReportedUnit) -> _Device | None:
        devices = self._nodes.get(node)
        if devices is None:
            return None
        return devices.get((unit.plugin, unit.device)) or devices.get((unit.plugin, unit.unit))

    def _add(self, devices: dict[tuple[str, str], _Device], reading: DeviceReadings, time: float, now: float) -> None:
        key = reading.plugin, reading.device
        after, known = counters(reading, time), devices.get(key)
        if known is None:
            if self.size >= self._max_devices or not reading.values:
                return
            self.size += 1
            known = devices[key] = _Device(after, now)
        elif after.fresh or after.busy is not None:
            if after.time > known.counters.time:
                known.rates = rates(known.counters, after)
            known.counters = after
        known.use, known.time = use_of(reading, known.rates), now
        _record(known, int(now // 60))


def _record(device: _Device, minute: int) -> None:
    values = (device.use.busy, device.use.memory, device.use.power)
    if device.history is None:
        if values == (None, None, None):
            return
        device.history = array("H", [_NONE]) * (MINUTES * len(_SCALES))
        device.minute = minute
    for skipped in range(max(device.minute + 1, minute - MINUTES + 1), minute + 1):
        for first in range(0, len(device.history), MINUTES):
            device.history[first + skipped % MINUTES] = _NONE
    device.minute = minute
    for index, (value, scale) in enumerate(zip(values, _SCALES.values(), strict=True)):
        if value is not None:
            device.history[index * MINUTES + minute % MINUTES] = max(0, min(_NONE - 1, round(value / scale)))
