"""The pod and the container of a process, from the text of `/proc/<pid>/cgroup` (cgroups(7)).

The kubelet names cgroups of pods after their UIDs. The systemd driver writes `_` for `-`, and the runtime appends
`cri-containerd-<ID>.scope` or `crio-<ID>.scope`; the cgroupfs driver appends the container's ID. Paths outside of the
reader's cgroup namespace begin with `/..`, which may stand for the directory `kubepods`.
"""

import functools
import re

from msgspec import Struct

_UUID = r"[0-9a-f]{8}(?P<dash>[-_])[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{12}"
# Static pods have a hash instead of a UUID. A parent cgroup may precede `kubepods` in the names of systemd's slices.
_POD = re.compile(
    rf"(?P<parents>[A-Za-z0-9_.-]*kubepods-(?:burstable-|besteffort-)?)?pod(?P<uid>{_UUID}|[0-9a-f]{{32}})(?:\.slice)?",
    re.ASCII,
)
_KUBEPODS = re.compile(r"(?:[A-Za-z0-9_.-]*-)?kubepods(?:\.slice)?", re.ASCII)
_CONTAINER = re.compile(r"(?:cri-containerd-|crio-|docker-|libpod-)?([0-9a-f]{64})(?:\.scope)?", re.ASCII)
_MAX_SEGMENTS = 64


class ContainerCgroup(Struct, frozen=True):
    """The pod's UID as in the API, and the runtime's ID of the container, empty if the path does not have it."""

    pod: str
    id: str


@functools.lru_cache(maxsize=1024)
def container_cgroup(text: str) -> ContainerCgroup | None:
    """The container that the last path with a pod names, None for processes outside of pods."""
    found = None
    for line in text.split("\n"):
        path = line.split(":", 2)[-1] if line.count(":") >= 2 else ""
        found = _in_path(path) or found
    return found


def _in_path(path: str) -> ContainerCgroup | None:
    # containerd with the cgroupfs driver on a systemd host writes slice, runtime and ID with colons into one name
    segments = path.replace(":cri-containerd:", "/").split("/")
    if not path.startswith("/") or len(segments) > _MAX_SEGMENTS:
        return None
    below_kubepods = segments[1] == ".."
    found = None
    for index, segment in enumerate(segments):
        below_kubepods = below_kubepods or _KUBEPODS.fullmatch(segment) is not None
        match = _POD.fullmatch(segment)
        if match and (below_kubepods or match["parents"]):
            following = segments[index + 1] if index + 1 < len(segments) else ""
            container = _CONTAINER.fullmatch(following)
            found = ContainerCgroup(match["uid"].replace("_", "-"), container[1] if container else "")
    return found
