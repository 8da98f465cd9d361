"""The document of `/api/v1/inventory`: devices, their health and their holders.

Times are seconds since the epoch, 0 if unknown; counts are numbers of device IDs. An empty text means that the fact
does not exist or is not known.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from accelplane.report.limits import (
    MAX_HISTORY,
    MAX_PLUGINS,
    MAX_PROBLEMS,
    MAX_RESOURCES,
    MAX_SKIPPED,
    MAX_UNIT_HOLDERS,
    MAX_UNITS,
    Count,
    Name,
    Text,
    Time,
    Version,
)

PhaseName = Literal["healthy", "suspect", "unhealthy", "recovering"]


class Holder(Struct, frozen=True, gc=False):
    """A container with IDs of a unit; `namespace` and `pod` are empty if the source does not name it.

    With `via` "dra" the container has the unit by a claim, and `resource` is the driver of the claim.
    """

    namespace: Name
    pod: Name
    container: Name
    resource: Name
    count: Count
    since: Time = 0.0
    via: Name = ""


class Change(Struct, frozen=True, gc=False):
    """One entry of a unit's health history: it entered a phase."""

    time: Time
    phase: PhaseName
    reason: Name = ""
    text: Text = ""


class ReportedUnit(Struct, frozen=True, gc=False):
    """A physical device or a part of it. `ids` has the number of IDs by resource.

    `known` is false while the source of the health does not answer. If a healthy unit has a `reason`, it is a warning;
    `text` describes it. `owner` is plugin, dra, or none while the unit changes its owner; empty where DRA is not used.
    `published`: a ResourceSlice has the unit. A unit that a claim holds is listed also if the scan does not find it.
    """

    plugin: Name
    unit: Name
    device: Name = ""
    bdf: Name = ""
    model: Name = ""
    numa: Annotated[int, Meta(ge=-1, le=65_536)] | None = None
    phase: PhaseName = "healthy"
    known: bool = True
    reason: Name = ""
    text: Text = ""
    since: Time = 0.0
    idle_since: Time = 0.0
    owner: Name = ""
    published: bool = False
    ids: Annotated[dict[Name, Count], Meta(max_length=MAX_RESOURCES)] = {}
    holders: Annotated[tuple[Holder, ...], Meta(max_length=MAX_UNIT_HOLDERS)] = ()
    history: Annotated[tuple[Change, ...], Meta(max_length=MAX_HISTORY)] = ()


class AdvertisedResource(Struct, frozen=True, gc=False):
    """A resource of a plugin. `stage` is that of its registration at the kubelet, `problem` why there is none."""

    name: Name
    stage: Name = ""
    problem: Text = ""
    ids: Count = 0
    healthy: Count = 0
    allocated: Count = 0


class SkippedHardware(Struct, frozen=True, gc=False):
    """Hardware that a plugin found and does not advertise."""

    plugin: Name
    subject: Name
    reason: Text


class PluginInventory(Struct, frozen=True, gc=False):
    name: Name
    resources: Annotated[tuple[AdvertisedResource, ...], Meta(max_length=MAX_RESOURCES)]
    units: Annotated[tuple[ReportedUnit, ...], Meta(max_length=MAX_UNITS)]
    skipped: Annotated[tuple[SkippedHardware, ...], Meta(max_length=MAX_SKIPPED)]


class HoldersSource(Struct, frozen=True, gc=False):
    """Where the holders come from, and the age of that answer in seconds when this generation was made."""

    source: Name = ""
    age: Time | None = None


class NodeInventory(Struct, frozen=True, gc=False):
    """The document. `generation` changes with everything but the age of the holders.

    `problems` name the plugins that are skipped, and hooks of others with what is wrong with their results.
    """

    version: Version
    node: Name
    agent: Name
    versions: Annotated[dict[Name, Name], Meta(max_length=MAX_PLUGINS)]
    generation: Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:-]{1,64}\Z")]
    plugins: Annotated[tuple[PluginInventory, ...], Meta(max_length=MAX_PLUGINS)] = ()
    holders: HoldersSource = HoldersSource()
    problems: Annotated[tuple[Text, ...], Meta(max_length=MAX_PROBLEMS)] = ()

    @property
    def units(self) -> tuple[ReportedUnit, ...]:
        """The units of all plugins."""
        return tuple(unit for plugin in self.plugins for unit in plugin.units)
