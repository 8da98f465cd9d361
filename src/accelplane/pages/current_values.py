"""The content of `/api/v1/readings`: the current values of the devices, under the names of their metrics.

The format is a contract with `accelplane fleet` and other programs: version 1, with the limits below.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct

from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.readings import NodeReadings
from accelplane.readings.families import AWAKE, INFO, STUCK

VERSION = 1
MAX_BYTES = 2 * 1024 * 1024

_MAX_PLUGINS = 64
_MAX_DEVICES = 4096
_MAX_VALUES = 512
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
# Labels that name the device, which every value of it has.
_IDENTITY = ("plugin", "device", "bdf")


class CurrentValue(Struct, frozen=True):
    name: str
    value: float
    labels: Mapping[str, str]


class DeviceValues(Struct, frozen=True):
    """The values of one device. `outcomes` counts the reads of the last reading by outcome."""

    device: str
    bdf: str
    awake: bool
    stuck: bool
    values: Sequence[CurrentValue]
    outcomes: Mapping[str, int]


class PluginValues(Struct, frozen=True):
    name: str
    devices: Sequence[DeviceValues]


class CurrentValues(Struct, frozen=True):
    """The document; `time` is the Unix time of the reading."""

    version: int
    time: float
    plugins: Sequence[PluginValues]


def current_values(readings: NodeReadings, time: float) -> CurrentValues:
    plugins: dict[str, list[DeviceValues]] = {}
    for reading in readings.devices:
        devices = plugins.setdefault(reading.plugin, [])
        if len(devices) < _MAX_DEVICES:
            devices.append(_device(reading))
    return CurrentValues(
        VERSION, time, [PluginValues(name, devices) for name, devices in list(plugins.items())[:_MAX_PLUGINS]]
    )


def document(readings: NodeReadings, time: float) -> bytes:
    """The JSON, at most `MAX_BYTES`: the devices at the end of the list are left out."""
    found = current_values(readings, time)
    encoded = msgspec.json.encode(found)
    while len(encoded) > MAX_BYTES:
        shorter = [PluginValues(each.name, each.devices[: len(each.devices) // 2]) for each in found.plugins]
        found = CurrentValues(VERSION, time, shorter)
        encoded = msgspec.json.encode(found)
    return encoded


def parse_labels(text: str) -> dict[str, str]:
    """The labels that `readings.values.labels` has rendered."""
    return {
        name: _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
        for name, value in _LABEL.findall(text)
    }


def _device(reading: DeviceReading) -> DeviceValues:
    values = [value for family, lines in reading.lines.items() if family is not INFO for value in _values(lines)]
    return DeviceValues(
        reading.device,
        reading.bdf,
        awake=all(value.value != 0 for value in values if value.name == AWAKE.name),
        stuck=any(value.name == STUCK.name for value in values),
        values=values[:_MAX_VALUES],
        outcomes=dict(reading.outcomes),
    )


def _values(lines: Sequence[str]) -> Iterator[CurrentValue]:
    for line in lines:
        prefix, _, text = line.rpartition(" ")
        value = float(text)
        if math.isfinite(value):  # JSON has no other numbers
            name, labels = _parsed(prefix)
            yield CurrentValue(name, value, labels)


@lru_cache(maxsize=8192)
def _parsed(prefix: str) -> tuple[str, Mapping[str, str]]:
    """The name of the metric, and the labels beside those of the device."""
    name, _, labels = prefix.partition("{")
    return name, {key: text for key, text in parse_labels(labels).items() if key not in _IDENTITY}
