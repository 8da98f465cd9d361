"""The tiles of GPUs: i915 has a directory `gt/gt<number>` below the card for each, xe `device/tile<number>`."""

import re
from collections.abc import Iterable

from accelplane.host import Host, HostError

_CARD = re.compile(r"card[0-9]+")
_INTEL = "0x8086"


def tile_counts(host: Host, drm: str) -> dict[str, int]:
    """The number of tiles of each Intel card in the class directory `drm`, physical functions with VFs included."""
    counts: dict[str, int] = {}
    for name in _names(host, drm):
        card = f"{drm}/{name}"
        if not _CARD.fullmatch(name):
            continue
        try:
            compatible = host.text(f"{card}/device/vendor") == _INTEL and host.exists(f"{card}/device/drm")
        except HostError:
            continue  # the scan reports it
        if compatible:
            i915 = sum(each.startswith("gt") for each in _names(host, f"{card}/gt"))
            xe = sum(each[:-1] == "tile" for each in _names(host, f"{card}/device"))
            counts[name] = i915 + xe or 1
    return counts


def common_tile_count(counts: Iterable[int], before: int) -> int:
    """The number of tiles that all cards have; `before` if they differ or there are no cards."""
    found = set(counts)
    return found.pop() if len(found) == 1 else before


def _names(host: Host, directory: str) -> list[str]:
    try:
        return host.optional_names(directory)
    except HostError as error:
        host.note(f"tiles not counted: {error}")
        return []
