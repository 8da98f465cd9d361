"""NUMA nodes of devices, from sysfs.

A device's node is found by walking up from its sysfs directory to the first one with `numa_node` or `local_cpulist`
(kernel document: Documentation/ABI/testing/sysfs-bus-pci). Device mapper devices and VFIO groups represent others,
their `slaves` and the members of the IOMMU group; these count as well.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from accelplane.host.errors import HostError, Missing, Unreadable
from accelplane.host.files import HostFiles

_DEVICES = "/sys/devices/"
_VFIO_GROUPS = "/sys/devices/virtual/vfio/"
_MAX_DEPTH = 32


class Hint(NamedTuple):
    """The attributes of one sysfs directory; `cpus` and `numa` as written there, possibly empty."""

    cpus: str
    numa: str
    socket: str = ""


Cache = dict[str, Hint]


def of_sysfs(host: HostFiles, devices: Iterable[str], cache: Cache) -> tuple[int, ...] | None:
    """See `Host.topology_of`."""
    nodes: set[int] = set()
    for device in devices:
        try:
            for hint in hints(host, device, cache).values():
                nodes.update(_numbers(hint.numa))
        except (HostError, ValueError) as error:
            host.note(f"NUMA node of {device} unknown: {error}")
    return tuple(sorted(nodes)) or None


def sysfs_device(host: HostFiles, node: str) -> str:
    """The sysfs directory of the device behind a file. Raises `HostError`."""
    status = host.status(node)
    if status is None:
        raise Missing(node, "does not exist")
    if host.is_plain_stand_in(status):
        # Without device numbers the name identifies the device: /dev/dri/card0 is /sys/class/drm/card0.
        name = node.rpartition("/")[2]
        for subsystem in _entries(host, "/sys/class") if name else ():
            if host.exists(f"{subsystem}/{name}"):
                return host.resolve(f"{subsystem}/{name}")
        raise Missing(node, f"not a device node, and no /sys/class/*/{name}")
    if stat.S_ISCHR(status.st_mode):
        kind, number = "char", status.st_rdev
    else:
        kind, number = "block", status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    if os.major(number) == 0:
        raise Unreadable(node, "a virtual device node")
    link = f"/sys/dev/{kind}/{os.major(number)}:{os.minor(number)}"
    target = host.resolve(link)
    if target == link:
        raise Missing(link, f"no such link for {node}")
    return target


def hints(host: HostFiles, device: str, cache: Cache, depth: int = 0, seen: set[str] | None = None) -> dict[str, Hint]:
    """Hints of a sysfs device and of those it represents, by the directory with the attributes. Raises `HostError`."""
    start = host.resolve(device)
    seen = set() if seen is None else seen
    if start in seen:
        return {}
    seen.add(start)
    if not host.exists(start):
        raise Missing(start, "does not exist")
    found: dict[str, Hint] = {}
    directory = start
    while directory.startswith(_DEVICES) or directory == start:
        hint = _hint(host, directory, cache, depth)
        if any(hint):
            found[directory] = hint
            break
        directory = directory.rpartition("/")[0]
    if depth < _MAX_DEPTH:
        for dependent in _dependents(host, start):
            for provider, hint in hints(host, dependent, cache, depth + 1, seen).items():
                found.setdefault(provider, hint)
    return found


def _hint(host: HostFiles, directory: str, cache: Cache, depth: int) -> Hint:
    if directory not in cache:
        cache[directory] = Hint("", "")  # ends the recursion in a cycle
        try:
            cache[directory] = _read_hint(host, directory, cache, depth)
        except HostError:
            del cache[directory]
            raise
    return cache[directory]


def _read_hint(host: HostFiles, directory: str, cache: Cache, depth: int) -> Hint:
    cpus = host.optional_text(f"{directory}/local_cpulist")
    numa = host.optional_text(f"{directory}/numa_node")
    if numa == "-1":
        return Hint(cpus or "", "")
    if cpus or not numa:
        return Hint(cpus or "", numa or "")
    if cpus is None:
        return Hint("", numa)
    # Without local CPUs, firmware has reported a socket number instead of a node: use the parent.
    parent: list[Hint] = []
    if depth < _MAX_DEPTH:
        try:
            parent = list(hints(host, directory.rpartition("/")[0], cache, depth + 1).values())
        except HostError as error:
            host.note(f"{directory}: numa_node without local CPUs, and its parent cannot be read: {error}")
    cpus = ",".join(dict.fromkeys(hint.cpus for hint in parent if hint.cpus))
    nodes = ",".join(dict.fromkeys(hint.numa for hint in parent if hint.numa))
    return Hint(cpus, nodes or numa) if cpus else Hint("", "", socket=numa)


def _dependents(host: HostFiles, device: str) -> Iterator[str]:
    yield from _entries(host, f"{device}/slaves")
    if device.startswith(_VFIO_GROUPS):
        group = device.removeprefix(_VFIO_GROUPS)
        if "/" not in group:
            yield from _entries(host, f"/sys/kernel/iommu_groups/{group}/devices")


def _entries(host: HostFiles, directory: str) -> Iterator[str]:
    """A directory's entries, without dangling links; none if there is no such directory."""
    return filter(host.exists, [f"{directory}/{name}" for name in host.entries(directory)])


def _numbers(numa: str) -> list[int]:
    try:
        numbers = [int(entry) for entry in numa.split(",")] if numa else []
    except ValueError:
        raise ValueError(f"numa_node is {numa[:40]!a}, expected numbers") from None
    if any(not 0 <= number < 2**31 for number in numbers):
        raise ValueError(f"numa_node is {numa[:40]!a}, expected numbers from 0")
    return numbers
