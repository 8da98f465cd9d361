"""Statistics of a DRM client in the text of `/proc/<pid>/fdinfo/<fd>`.

The keys are those of the kernel document "DRM client usage stats" (Documentation/gpu/drm-usage-stats.rst). i915 has
busy nanoseconds by engine class, xe has cycles and total cycles.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

# Files of other kinds have none of these keys.
MARK = b"drm-driver:"

_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII)
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,20}", re.ASCII)
_UNITS = {"": 1, "KiB": 1024, "MiB": 1024 * 1024}
_MAX_NAMES = 16  # of engine classes and of memory regions
_MAX_CAPACITY = 256
_KINDS = ("resident", "total", "shared")


class Cycles(NamedTuple):
    """The cycles in which a client used engines of a class, and all cycles in the same time."""

    used: int
    total: int


class DrmClient(Struct, frozen=True, kw_only=True):
    """The statistics of one client: one open file of a GPU, and its duplicates.

    `busy` is in nanoseconds, `memory` in bytes, by region and kind: resident, total or shared. `capacity` is the number
    of engines of a class if it is not 1.
    """

    bdf: str
    id: int
    driver: str
    busy: Mapping[str, int] = {}
    cycles: Mapping[str, Cycles] = {}
    capacity: Mapping[str, int] = {}
    memory: Mapping[str, Mapping[str, int]] = {}


def parse_fdinfo(text: str) -> DrmClient | None:
    """The client, None if the text does not name a driver, a PCI device and a client. Invalid values are left out."""
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        key, colon, value = line.partition(":")
        if colon and key.startswith("drm-"):
            fields.setdefault(key[4:], value.strip(" \t"))
    driver, bdf, id_ = fields.get("driver", ""), fields.get("pdev", ""), fields.get("client-id", "")
    if not (_WORD.fullmatch(driver) and _BDF.fullmatch(bdf) and _NUMBER.fullmatch(id_)):
        return None
    used = _numbers(fields, "cycles-", ("",))
    total = _numbers(fields, "total-cycles-", ("",))
    return DrmClient(
        bdf=bdf,
        id=int(id_),
        driver=driver,
        busy=_numbers(fields, "engine-", ("ns",), besides="engine-capacity-"),
        cycles={name: Cycles(used[name], total[name]) for name in used if name in total},
        capacity={
            name: number
            for name, number in _numbers(fields, "engine-capacity-", ("",)).items()
            if 1 < number <= _MAX_CAPACITY
        },
        memory=_memory(fields),
    )


def _numbers(
    fields: Mapping[str, str], prefix: str, units: Iterable[str], *, besides: str | None = None
) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in fields.items():
        if not key.startswith(prefix) or (besides and key.startswith(besides)):
            continue
        name = key.removeprefix(prefix)
        digits, _, unit = value.partition(" ")
        if _WORD.fullmatch(name) and _NUMBER.fullmatch(digits) and unit in units and len(found) < _MAX_NAMES:
            found[name] = int(digits) * _UNITS.get(unit, 1)
    return found


def _memory(fields: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Bytes by region and kind. `drm-memory-<region>` is the old name of the resident bytes."""
    kinds = {kind: _numbers(fields, f"{kind}-", _UNITS, besides="total-cycles-") for kind in _KINDS}
    resident = {**_numbers(fields, "memory-", _UNITS), **kinds["resident"]}
    regions: dict[str, dict[str, int]] = {}
    for kind, sizes in {**kinds, "resident": resident}.items():
        for region, size in sizes.items():
            if region in regions or len(regions) < _MAX_NAMES:
                regions.setdefault(region, {})[kind] = size
    return regions
