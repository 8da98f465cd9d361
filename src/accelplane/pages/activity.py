"""Which units that containers hold are used, as far as readings show it.

A unit is active if its GT was busy for more than 2 % of the time between two readings or its clients kept engines busy,
if its NPU executed jobs, if its QAT device got requests, or if its work queue has clients or entries. Other units have
no such signal.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from accelplane.pages.readings import NodeReadings
from accelplane.readings import Family, Value
from accelplane.readings.families import ACTIVITY, GPU_IDLE, IDXD_QUEUE_CLIENTS, IDXD_QUEUE_ENTRIES
from accelplane.readings.values import labels

# A GT that is busy for a smaller part of the time does housekeeping.
_IDLE_SHARE = 0.98
_QUEUE = frozenset((IDXD_QUEUE_CLIENTS, IDXD_QUEUE_ENTRIES))
# A reading that is not fresh repeats these.
_WAKING = frozenset((GPU_IDLE,))
# Shorter pauses are no change of the inventory.
_IDLE_STATE = 600.0

Unit = tuple[str, str]  # plugin, unit
Moment = tuple[float, float]  # of the last activity: monotonic and Unix time


class Counters(NamedTuple):
    """The counters of a device at a monotonic time."""

    time: float
    values: Mapping[tuple[Family, str], float]


class Activity:
    """The time of the last activity of each held unit, as seen by the readings that others request."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], Counters] = {}
        self._active_at: dict[Unit, Moment] = {}
        # The same as seen by the time of the clients of GPUs, and this time at the last report.
        self._clients_active_at: dict[Unit, Moment] = {}
        self._client_seconds: Mapping[Unit, float] = {}

    def update(self, readings: NodeReadings, held: Collection[Unit], now: float) -> None:
        """Takes over a reading that ended at the monotonic time `now`."""
        found: dict[Unit, Moment] = {}
        moment = _moment(now)
        devices: dict[tuple[str, str], Counters] = {}
        for reading in readings.devices:
            key = (reading.plugin, reading.device)
            counters = self._counters.get(key)
            values = [value for value in reading.activity if reading.fresh or value.family not in _WAKING]
            active, present = signals(values, reading.units, counters, now)
            for unit in reading.units:
                place = (reading.plugin, unit)
                if place in held and (unit in active or place in self._active_at):
                    found[place] = moment if active.get(unit) else self._active_at.get(place, moment)
            if present is not None or counters is not None:
                devices[key] = present or counters or Counters(now, {})
        self._active_at = found
        self._counters = devices

    def update_clients(self, seconds: Mapping[Unit, float], held: Collection[Unit], now: float) -> None:
        """Takes over a report on the clients of GPUs: the time in which they kept engines busy, 0 without clients."""
        moment = _moment(now)
        found: dict[Unit, Moment] = {}
        for unit, value in seconds.items():
            if unit in held:
                # Less than before is the sum without a pod that has ended.
                moved = value > self._client_seconds.get(unit, value)
                found[unit] = moment if moved else self._clients_active_at.get(unit, moment)
        self._clients_active_at = found
        self._client_seconds = seconds

    def idle_seconds(self, now: float) -> Mapping[Unit, float]:
        """The time since the last activity of each held unit with a signal."""
        return {unit: max(0.0, now - at) for unit, (at, _) in self._last().items()}

    def idle_since(self, now: float) -> Mapping[Unit, float]:
        """The Unix time of the last activity of each unit that has been idle for ten minutes, in whole seconds."""
        return {unit: moment for unit, (at, moment) in self._last().items() if now - at >= _IDLE_STATE}

    def _last(self) -> Mapping[Unit, Moment]:
        """The last activity by any signal."""
        last = dict(self._active_at)
        for unit, moment in self._clients_active_at.items():
            last[unit] = max(moment, last.get(unit, moment))
        return last


def _moment(now: float) -> Moment:
    return now, float(int(time.time()))


def signals(
    values: Iterable[Value], units: Iterable[str], before: Counters | None, now: float
) -> tuple[Mapping[str, bool], Counters | None]:
    """Whether each unit with a signal is active, and the counters for the next call."""
    counters: dict[tuple[Family, str], float] = {}
    queues: dict[str, float] = {}
    for family, extra, value in values:
        if family not in ACTIVITY:
            continue
        if family in _QUEUE:
            queues[extra] = queues.get(extra, 0.0) + value
        else:
            counters[family, extra] = counters.get((family, extra), 0.0) + value
    names = list(units)
    if queues:
        used = [extra for extra, value in queues.items() if value > 0]
        return {unit: any(extra.startswith(prefix) for extra in used) for unit, prefix in _prefixes(tuple(names))}, None
    if not counters:
        return {}, None
    moved = before is not None and any(_moved(key, value, before, now) for key, value in counters.items())
    return dict.fromkeys(names, moved), Counters(now, counters)


@lru_cache(maxsize=256)
def _prefixes(units: tuple[str, ...]) -> Sequence[tuple[str, str]]:
    """Each unit with the beginning of the labels of its samples."""
    return [(unit, labels(unit=unit)) for unit in units]


def _moved(key: tuple[Family, str], value: float, before: Counters, now: float) -> bool:
    known = before.values.get(key)
    if known is None or now <= before.time:
        return False
    if key[0] is GPU_IDLE:
        # A decreasing counter belongs to a driver that was reloaded.
        return value >= known and value - known < _IDLE_SHARE * (now - before.time)
    return value > known
