"""The device nodes behind a path: CDI has neither symbolic links nor directories."""

import stat
from collections.abc import Iterator

from accelplane.host.host import Host

_MAX_NODES = 256  # of a directory
_MAX_DEPTH = 4


def nodes_behind(host: Host, path: str) -> dict[str, str]:
    """By the path below `path`, empty for a device node or a link to one, the device nodes. Raises `HostError`.

    Of a directory, at most 256 nodes in 4 levels.
    """
    real = host.resolve(path)
    found: dict[str, str] = {}
    for below in _nodes_below(host, real, "", 0):
        if len(found) == _MAX_NODES:
            break
        found[below] = real + below
    return found


def _nodes_below(host: Host, directory: str, below: str, depth: int) -> Iterator[str]:
    status = host.status(directory + below)
    if status is None:
        return
    mode = status.st_mode
    if not stat.S_ISDIR(mode):
        if not below or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or host.is_plain_stand_in(status):
            yield below
        return
    if depth < _MAX_DEPTH:
        for name in host.names(directory + below)[:_MAX_NODES]:
            yield from _nodes_below(host, directory, f"{below}/{name}", depth + 1)
