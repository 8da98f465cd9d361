"""Plans: what to read of a device, in which order, and whether reading may wake it up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from accelplane.readings.values import LABEL_NAME, Parse

Decision = Literal["read", "repeat", "skip"]

ATTRIBUTE_LIMIT = 4096
TABLE_LIMIT = 64 * 1024  # of files in debugfs

# An awake device without a holder is read at most this often, so that it can fall asleep between readings.
_UNHELD_INTERVAL = 60.0
_AWAKE = ("active", "unsupported")
_IDENTITY = ("plugin", "device", "bdf")


class Source(Struct, frozen=True, kw_only=True):
    """A file and the meaning of its text.

    `parse` and `follow` are pure functions: they are called only if the text differs from that of the last reading.
    `waking`: the driver powers the device up to answer. `constant`: the text is that of the hardware, and is read once
    for each plan. `wraps_after`: a counter of the device may wrap in more than this number of seconds without a
    reading. `follow` returns further sources that depend on the text. `by_lines`: the lines within `limit` of a longer
    text have values; the text is invalid nevertheless.

    With `members` the path is a directory, and `members` returns the sources of its entries, by their names, at each
    reading. The value of a source that `accumulates` is the increase of its numbers, of all its paths together, since
    the first reading: entries come and go, and a counter must not go down.
    """

    path: str
    parse: Parse
    waking: bool = False
    constant: bool = False
    limit: int = ATTRIBUTE_LIMIT
    by_lines: bool = False
    wraps_after: float = 0.0
    follow: "Callable[[str], Sequence[Source]] | None" = None
    members: "Callable[[Sequence[str]], Sequence[Source]] | None" = None
    accumulates: bool = False


class DevicePlan(Struct, frozen=True, kw_only=True):
    """The sources of one physical device.

    `device` is the kernel's name. `units` are the units of the inventory that belong to the device. `power` is the
    directory with `runtime_status`, empty if the device has no runtime power management. A device that `never_sleeps`
    may always be read.

    `path` is its directory in sysfs: unless the plan has them, the agent sets `bdf`, the PCI address, and `facts`,
    further labels of `accelplane_device_info`, from it; without a path from the nodes of its units. Raises `ValueError`
    if a name of the facts is invalid.
    """

    device: str
    units: Sequence[str]
    path: str = ""
    bdf: str = ""
    power: str = ""
    never_sleeps: bool = False
    sources: Sequence[Source] = ()
    facts: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for name in self.facts:
            if name in _IDENTITY or not LABEL_NAME.fullmatch(name):
                names = ", ".join(_IDENTITY)
                raise ValueError(f"fact {name!a}: expected letters, digits and _, and another name than {names}")


def is_awake(status: str) -> bool:
    return status in _AWAKE


def waking_reads(mode: str, *, status: str, autosuspend: float, held: bool, since_waking: float) -> Decision:
    """Whether to read files that wake the device, to repeat their last values, or to have no values.

    `mode` is `auto` (decide by the power status), `always` or `never`. Times are in seconds; `since_waking` is that
    since the last such reads.
    """
    if mode != "auto":
        return "read" if mode == "always" else "skip"
    if not is_awake(status):
        return "skip"
    if held or status == "unsupported" or since_waking >= max(_UNHELD_INTERVAL, 3 * autosuspend):
        return "read"
    return "repeat"
