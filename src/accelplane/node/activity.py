"""Which units that containers hold are used, as far as readings show it.

A unit is active if its GT was busy for more than 2 % of the time between two readings, if its NPU executed jobs, if its
QAT device got requests, or if its work queue has clients or entries. Other units have no such signal.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from accelplane.node.readings import NodeReadings
from accelplane.readings import Family, Value
from accelplane.readings.families import (
    GPU_IDLE,
    IDXD_QUEUE_CLIENTS,
    IDXD_QUEUE_ENTRIES,
    NPU_BUSY,
    QAT_REQUESTS,
)
from accelplane.readings.values import labels

# A GT that is busy for a smaller part of the time does housekeeping.
_IDLE_SHARE = 0.98
_RISING = (NPU_BUSY, QAT_REQUESTS)
_QUEUE = (IDXD_QUEUE_CLIENTS, IDXD_QUEUE_ENTRIES)
# Shorter pauses are no change of the inventory.
_IDLE_STATE = 600.0

Unit = tuple[str, str]  # plugin, unit


class Counters(NamedTuple):
    """The counters of a device at a monotonic time."""

    time: float
    values: Mapping[tuple[Family, str], float]


class Activity:
    """The time of the last activity of each held unit, as seen by the readings that others request."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], Counters] = {}
        # The monotonic and the Unix time of the last activity.
        self._active_at: dict[Unit, tuple[float, float]] = {}

    def update(self, readings: NodeReadings, held: Collection[Unit], now: float) -> None:
        """Takes over a reading that ended at the monotonic time `now`."""
        found: dict[Unit, tuple[float, float]] = {}
        moment = (now, float(int(time.time())))
        devices: dict[tuple[str, str], Counters] = {}
        for reading in readings.devices:
            key = (reading.plugin, reading.device)
            counters = self._counters.get(key)
            fresh = not reading.outcomes.get("asleep")
            active, present = signals(reading.values if fresh else (), reading.units, counters, now)
            for unit in reading.units:
                place = (reading.plugin, unit)
                if place in held and (unit in active or place in self._active_at):
                    found[place] = moment if active.get(unit) else self._active_at.get(place, moment)
            if present is not None or counters is not None:
                devices[key] = present or counters or Counters(now, {})
        self._active_at = found
        self._counters = devices

    def idle_seconds(self, now: float) -> Mapping[Unit, float]:
        """The time since the last activity of each held unit with a signal."""
        return {unit: max(0.0, now - at) for unit, (at, _) in self._active_at.items()}

    def idle_since(self, now: float) -> Mapping[Unit, float]:
        """The Unix time of the last activity of each unit that has been idle for ten minutes, in whole seconds."""
        return {unit: moment for unit, (at, moment) in self._active_at.items() if now - at >= _IDLE_STATE}


def signals(
    values: Iterable[Value], units: Iterable[str], before: Counters | None, now: float
) -> tuple[Mapping[str, bool], Counters | None]:
    """Whether each unit with a signal is active, and the counters for the next call."""
    counters: dict[tuple[Family, str], float] = {}
    queues: dict[str, float] = {}
    for family, extra, value in values:
        if family is GPU_IDLE or family in _RISING:
            counters[family, extra] = counters.get((family, extra), 0.0) + value
        elif family in _QUEUE:
            queues[extra] = queues.get(extra, 0.0) + value
    names = list(units)
    if queues:
        active = {
            unit: any(value > 0 for extra, value in queues.items() if extra.startswith(labels(unit=unit)))
            for unit in names
        }
        return active, None
    if not counters:
        return {}, None
    moved = before is not None and any(_moved(key, value, before, now) for key, value in counters.items())
    return dict.fromkeys(names, moved), Counters(now, counters)


def _moved(key: tuple[Family, str], value: float, before: Counters, now: float) -> bool:
    known = before.values.get(key)
    if known is None or now <= before.time:
        return False
    if key[0] is GPU_IDLE:
        # A decreasing counter belongs to a driver that was reloaded.
        return value >= known and value - known < _IDLE_SHARE * (now - before.time)
    return value > known
