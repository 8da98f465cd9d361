"""Reports from outside which containers have device nodes: `python device_holders.py LOG DIRECTORY`.

It reads the processes of the machine in a loop, and nothing of the kubelet, the runtime and the driver. A container is
a mount namespace with its own root. LOG gets a line `held NODES` for each container with nodes below DIRECTORY, and a
line `shared NODE` when two running containers have the same node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.01


class Container(NamedTuple):
    """The mount namespace, and the first process in it with its start."""

    namespace: str
    pid: int
    start: str


def containers() -> Iterator[Container]:
    own = _root("self")
    found: set[str] = set()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if _root(str(pid)) == own:
                continue
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in found:
                found.add(namespace)
                yield Container(namespace, pid, _start(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended


def nodes(container: Container, directory: str) -> frozenset[str]:
    """The nodes that it has, empty if it has ended."""
    try:
        names = os.listdir(f"/proc/{container.pid}/root{directory}")
        return frozenset(names) - {"by-path"} if _start(container.pid) == container.start else frozenset()
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()


def shared(holders: Mapping[Container, Collection[str]], directory: str) -> Iterator[str]:
    """The nodes that two containers have at the same time: one of them may have ended before the other was read."""
    by_node: dict[str, list[Container]] = {}
    for container, held in holders.items():
        for node in held:
            by_node.setdefault(node, []).append(container)
    for node, having in sorted(by_node.items()):
        if sum(node in nodes(container, directory) for container in having) > 1:
            yield node


def main(log: Path, directory: str) -> None:
    known: set[Container] = set()
    reported: set[tuple[str, frozenset[Container]]] = set()
    with log.open("w", buffering=1) as lines:
        while True:
            holders = {each: held for each in containers() if (held := nodes(each, directory))}
            for each in holders.keys() - known:
                lines.write(f"held {' '.join(sorted(holders[each]))}\n")
            for node in shared(holders, directory):
                pair = node, frozenset(each for each, held in holders.items() if node in held)
                if pair not in reported:
                    lines.write(f"shared {node}\n")
                reported.add(pair)
            known.update(holders)
            time.sleep(INTERVAL)


def _root(pid: str) -> tuple[int, int]:
    status = os.stat(f"/proc/{pid}/root/")
    return status.st_dev, status.st_ino


def _start(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
