"""`Match`: the hardware of one device of a group, before it is shared."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType

from accelplane.devices import HEALTHY, Attribute, DeviceNode, Mount, Skipped
from accelplane.devices.device import HealthName

MAX_UNIT = 200


class Match(Struct, frozen=True, kw_only=True):
    """What one device of a group is. `unit` is its name.

    `hashed` is the text whose hashes are the IDs, those of squat's generic-device-plugin, so that the devices of
    running containers keep their IDs after a migration. Without it the IDs are made of `unit`.
    `links` maps nodes that are symbolic links or directories to the device nodes behind them, for CDI.
    `values` are those of the placeholders.
    """

    unit: str
    hashed: str = ""
    nodes: Sequence[DeviceNode] = ()
    mounts: Sequence[Mount] = ()
    links: Mapping[DeviceNode, Sequence[DeviceNode]] = {}
    path: str | None = ""
    part: str = ""
    topology: Sequence[int] | UnsetType | None = UNSET
    health: HealthName = HEALTHY
    reason: str = ""
    attributes: Mapping[str, Attribute] = {}
    values: Mapping[str, str] = {}

    def ids(self, count: int) -> list[str]:
        """The IDs for `count` containers."""
        if self.hashed:
            texts = [f"{number}{self.hashed}".encode() for number in range(count)]
            return [hashlib.sha1(text, usedforsecurity=False).hexdigest() for text in texts]
        return [self.unit] if count == 1 else [f"{self.unit}-{number}" for number in range(count)]


def joined(names: Sequence[str]) -> str:
    """The name of a unit that several files or devices are; with a hash instead of the others if it is long."""
    text = "+".join(names)
    if len(text) <= MAX_UNIT:
        return text
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return f"{names[0][: MAX_UNIT - 13]}+{digest[:12]}"


class Found(NamedTuple):
    """The matches of a group, and what was not published."""

    matches: list[Match]
    skipped: list[Skipped]


def printable(text: str, limit: int = 256) -> str:
    """The printable characters of a text that hardware reports."""
    return "".join(filter(str.isprintable, text[:limit])).strip()
