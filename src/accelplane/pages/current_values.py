"""The content of `/api/v1/readings`, within the limits of the document. `report.readings` has the types."""

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.readings import NodeReadings
from accelplane.readings.families import AWAKE, INFO, STUCK
from accelplane.report.limits import MAX_BYTES, MAX_DEVICES, MAX_PLUGINS, MAX_VALUES, VERSION
from accelplane.report.readings import CurrentValues, DeviceReadings, PluginReadings, Value

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
# Labels that name the device, which every value of it has.
_IDENTITY = ("plugin", "device", "bdf")


def current_values(readings: NodeReadings, time: float) -> CurrentValues:
    plugins: dict[str, list[DeviceReadings]] = {}
    for reading in readings.devices:
        devices = plugins.setdefault(reading.plugin, [])
        if len(devices) < MAX_DEVICES:
            devices.append(device_values(reading))
    shown = list(plugins.items())[:MAX_PLUGINS]
    return CurrentValues(VERSION, time, tuple(PluginReadings(name, tuple(devices)) for name, devices in shown))


def document(readings: NodeReadings, time: float) -> bytes:
    """The JSON, at most `MAX_BYTES`: the devices at the end of the list are left out."""
    found = current_values(readings, time)
    encoded = msgspec.json.encode(found)
    while len(encoded) > MAX_BYTES:
        shorter = tuple(PluginReadings(each.name, each.devices[: len(each.devices) // 2]) for each in found.plugins)
        found = CurrentValues(VERSION, time, shorter)
        encoded = msgspec.json.encode(found)
    return encoded


def parse_labels(text: str) -> dict[str, str]:
    """The labels that `readings.values.labels` has rendered."""
    return {
        name: _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
        for name, value in _LABEL.findall(text)
    }


def device_values(reading: DeviceReading) -> DeviceReadings:
    """The values of a device in the document."""
    values = [value for family, lines in reading.lines.items() if family is not INFO for value in _values(lines)]
    return DeviceReadings(
        reading.plugin,
        reading.device,
        reading.bdf,
        awake=all(value.value != 0 for value in values if value.name == AWAKE.name),
        stuck=any(value.name == STUCK.name for value in values),
        values=tuple(values[:MAX_VALUES]),
        outcomes=dict(reading.outcomes),
        fresh=reading.fresh,
    )


def _values(lines: Sequence[str]) -> Iterator[Value]:
    for line in lines:
        prefix, _, text = line.rpartition(" ")
        value = float(text)
        if math.isfinite(value):  # JSON has no other numbers
            name, labels = _parsed(prefix)
            yield Value(name, labels, value)


@lru_cache(maxsize=8192)
def _parsed(prefix: str) -> tuple[str, dict[str, str]]:
    """The name of the metric, and the labels beside those of the device."""
    name, _, labels = prefix.partition("{")
    return name, {key: text for key, text in parse_labels(labels).items() if key not in _IDENTITY}
