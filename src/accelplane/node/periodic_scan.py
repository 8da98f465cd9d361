"""Repeated evaluation of a function of the host: after events, and at intervals. For results that are not devices."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from accelplane.host import Host, HostError
from accelplane.host.blocking import SerialThread
from accelplane.node.watcher import Watcher

log = logging.getLogger(__name__)

T = TypeVar("T")

# Modules and buses appear in bursts, and labels are not urgent.
_DEBOUNCE = 0.5


async def periodic_scan(
    name: str, root: str, scan: Callable[[Host], T], watcher: Watcher, *, subsystems: frozenset[str], interval: float
) -> AsyncGenerator[T, None]:
    """Yields what `scan` returns for the host below `root`: now, after uevents of `subsystems` and changes of the
    directories read, and every `interval` seconds.

    Raises what `scan` raises. Close it with `contextlib.aclosing`. `name` is the watcher's subscriber.
    """
    changed, thread = asyncio.Event(), SerialThread()
    logged: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()
    try:
        watcher.uevents(name, subsystems, changed.set)
        while True:
            changed.clear()
            host = Host(root)
            found = await thread.run(lambda host=host: scan(host))
            notes = frozenset(host.notes)
            for note in sorted(notes - logged):
                log.warning("%s: %s", name, note)
            logged = notes
            paths, own_tree = _paths(host), root != "/"
            watcher.directories(name, paths, changed.set, written=own_tree, root=host.root if own_tree else "")
            if not paths <= watched:
                changed.set()  # a change between the scan and the start of the watch caused no event
            watched |= paths
            yield found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await changed.wait()
                await asyncio.sleep(_DEBOUNCE)
    finally:
        watcher.forget(name)
        await thread.wait_idle(name)


def _paths(host: Host) -> frozenset[str]:
    """The directories to watch. The machine's own sysfs and procfs have uevents only, other trees inotify only."""
    own_tree = host.root != "/"
    paths: set[str] = set()
    for path in host.directories_read:
        if own_tree or not path.startswith(("/sys/", "/proc/")):
            with contextlib.suppress(HostError):
                paths.add(host.local(path))
    return frozenset(path for path in paths if own_tree or os.path.isdir(path))
