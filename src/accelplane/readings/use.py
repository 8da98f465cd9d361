"""The use of a device from its readings: gauges, and rates of counters between two readings.

Power is the rate of the energy counter, and a GT was busy while it was not idle. Everything here is a pure function.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from accelplane.readings import families
from accelplane.readings.values import Family
from accelplane.report.readings import DeviceReadings, Value

_WHOLE = ("card", "package", "fpga")
_SHORTEST = 0.2


class Counters(Struct, frozen=True, kw_only=True, gc=False):
    """The counters of a device at a time. `fresh` is false if some of them repeat an earlier reading."""

    time: float
    fresh: bool
    idle: Mapping[str, float] = {}
    busy: float | None = None
    energy: Mapping[str, float] = {}


class Rates(Struct, frozen=True, gc=False):
    """The rates between two readings: the busy share from 0 to 1, and watts."""

    busy: float | None = None
    power: float | None = None


class Use(Struct, frozen=True, kw_only=True, gc=False):
    """The gauges of a device, None without a reading. `awake` is None if the device has no runtime power management.

    `busy` is a share from 0 to 1, `memory` bytes, `power` and `limit` watts.
    """

    awake: bool | None = None
    stuck: bool = False
    busy: float | None = None
    memory: float | None = None
    power: float | None = None
    limit: float | None = None
    temperature: float | None = None
    frequency: float | None = None
    link_speed: float | None = None
    link_lanes: int | None = None


class Samples:
    """The values of a device by family."""

    def __init__(self, reading: DeviceReadings) -> None:
        self._values: dict[str, list[Value]] = {}
        for each in reading.values:
            self._values.setdefault(each.name, []).append(each)

    def of(self, family: Family) -> Sequence[Value]:
        return self._values.get(family.name, ())

    def first(self, family: Family) -> float | None:
        return next((each.value for each in self.of(family)), None)

    def by_label(self, family: Family, label: str) -> dict[str, float]:
        return {each.labels.get(label, ""): each.value for each in self.of(family)}


def counters(reading: DeviceReadings, time: float) -> Counters:
    samples = Samples(reading)
    return Counters(
        time=time,
        fresh=reading.fresh,
        idle=samples.by_label(families.GPU_IDLE, "gt"),
        busy=samples.first(families.NPU_BUSY),
        energy=samples.by_label(families.ENERGY, "sensor"),
    )


def rates(before: Counters, after: Counters) -> Rates:
    """The rates between two readings. Files that wake a device up count only if both readings have read them."""
    elapsed = after.time - before.time
    if elapsed < _SHORTEST:
        return Rates()
    busy: list[float] = []
    watts: dict[str, float] = {}
    if before.busy is not None and after.busy is not None and after.busy >= before.busy:
        busy.append((after.busy - before.busy) / elapsed)
    if before.fresh and after.fresh:
        idle = _differences(before.idle, after.idle)
        busy += [1 - seconds / elapsed for seconds in idle.values()]
        watts = {sensor: joules / elapsed for sensor, joules in _differences(before.energy, after.energy).items()}
    return Rates(min(1.0, max(0.0, *busy)) if busy else None, device_value(watts))


def use_of(reading: DeviceReadings, found: Rates) -> Use:
    """The use by a reading and the rates until then, which do not apply to a suspended device."""
    samples = Samples(reading)
    awake = samples.first(families.AWAKE)
    if awake == 0:
        found = Rates()
    power = samples.by_label(families.POWER, "sensor")
    limits = {
        each.labels.get("sensor", ""): each.value
        for each in samples.of(families.POWER_LIMIT)
        if each.labels.get("limit") == "sustained"
    }
    clocks = (*samples.of(families.GPU_FREQUENCY), *samples.of(families.NPU_FREQUENCY))
    slices = [each.value for each in samples.of(families.QAT_SLICE_UTILIZATION)]
    lanes = samples.first(families.LINK_LANES)
    return Use(
        awake=None if awake is None else bool(awake),
        stuck=reading.stuck,
        busy=max(slices) if slices else found.busy,
        memory=samples.first(families.NPU_MEMORY),
        power=device_value(power) if power else found.power,
        limit=device_value(limits),
        temperature=max((each.value for each in samples.of(families.TEMPERATURE)), default=None),
        frequency=max((each.value for each in clocks if each.labels.get("kind") == "actual"), default=None),
        link_speed=samples.first(families.LINK_SPEED),
        link_lanes=None if lanes is None else int(lanes),
    )


def device_value(by_sensor: Mapping[str, float]) -> float | None:
    """The value of the device: from its own sensor, or the sum of its tiles."""
    for sensor in _WHOLE:
        if sensor in by_sensor:
            return by_sensor[sensor]
    return sum(by_sensor.values()) if by_sensor else None


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The increases of counters. One that has decreased was reset: it has none."""
    return {key: after[key] - before[key] for key in after if key in before and after[key] >= before[key]}
