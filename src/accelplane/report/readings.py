"""The document of `/api/v1/readings`: the current values of the devices, under the names of their metrics."""

from typing import Annotated

from msgspec import Meta, Struct

from accelplane.report.limits import (
    MAX_DEVICES,
    MAX_LABELS,
    MAX_OUTCOMES,
    MAX_PLUGINS,
    MAX_VALUES,
    Count,
    Name,
    Time,
    Version,
)


class Value(Struct, frozen=True, gc=False):
    """A current value of a device, under the name and with the labels of its metric."""

    name: Name
    labels: Annotated[dict[Name, Name], Meta(max_length=MAX_LABELS)]
    value: float


class DeviceReadings(Struct, frozen=True, gc=False):
    """The values of a device. `outcomes` counts its reads by outcome; a missing value is explained by these.

    `fresh` is false if values whose files wake the device are those of an earlier reading.
    """

    plugin: Name
    device: Name
    bdf: Name = ""
    awake: bool = True
    stuck: bool = False
    values: Annotated[tuple[Value, ...], Meta(max_length=MAX_VALUES)] = ()
    outcomes: Annotated[dict[Name, Count], Meta(max_length=MAX_OUTCOMES)] = {}
    fresh: bool = True


class PluginReadings(Struct, frozen=True, gc=False):
    name: Name
    devices: Annotated[tuple[DeviceReadings, ...], Meta(max_length=MAX_DEVICES)]


class CurrentValues(Struct, frozen=True, gc=False):
    """The document; `time` is that of the reading."""

    version: Version
    time: Time
    plugins: Annotated[tuple[PluginReadings, ...], Meta(max_length=MAX_PLUGINS)] = ()
