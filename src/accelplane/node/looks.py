"""Looking at the host again and again: soon after the kernel or a directory tells of a change, else at times.

For what is no device and has no kubelet: a function of the host, whose results follow each other.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from accelplane.host import Host, HostError
from accelplane.host.blocking import in_thread
from accelplane.node.watch import Watcher

log = logging.getLogger(__name__)

T = TypeVar("T")

# Modules and buses come up in bursts, and nobody is in a hurry here.
_SETTLE = 0.5


async def looks(
    name: str,
    root: str,
    look: Callable[[Host], T],
    watcher: Watcher,
    *,
    subsystems: frozenset[str],
    interval: float,
) -> AsyncGenerator[T, None]:
    """What `look` returns of the host below `root`: now, after uevents of `subsystems`, and every `interval` seconds.

    Raises what `look` raises. Close it (`contextlib.aclosing`) when leaving it. `name` is the watcher's subscriber.
    """
    changed = asyncio.Event()
    told: frozenset[str] = frozenset()
    try:
        watcher.uevents(name, subsystems, changed.set)
        while True:
            changed.clear()
            host = Host(root)
            found = await in_thread(lambda host=host: look(host))
            notes = frozenset(host.notes)
            for note in sorted(notes - told):
                log.warning("%s: %s", name, note)
            told = notes
            _watch(name, host, watcher, changed)
            yield found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await changed.wait()
                await asyncio.sleep(_SETTLE)
    finally:
        watcher.forget(name)


def _watch(name: str, host: Host, watcher: Watcher, changed: asyncio.Event) -> None:
    """Below a root of its own there are no uevents, and inotify tells; the machine's sysfs and procfs know none."""
    own_tree = host.root != "/"
    directories: list[str] = []
    for path in host.directories_read:
        if own_tree or not path.startswith(("/sys/", "/proc/")):
            with contextlib.suppress(HostError):
                directories.append(host.local(path))
    present = [path for path in directories if own_tree or os.path.isdir(path)]
    watcher.directories(name, present, changed.set, written=own_tree, root=host.root if own_tree else "")
