"""Timestamps of the system calls with which this process creates or removes paths.

The simulated node does much before and after the one link that matters. CPython reports such calls to audit hooks
(PEP 578) just before it makes them. A hook stays until the process ends.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

_TARGET = {"os.symlink": 1, "os.link": 1, "os.remove": 0, "os.mkdir": 0}


class SyscallTimestamps:
    """The time at which each of the paths was last created or removed, by `time.perf_counter`."""

    def __init__(self, *paths: str) -> None:
        self.at = dict.fromkeys(paths, 0.0)
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: Sequence[Any]) -> None:
        place = _TARGET.get(event)
        if place is not None and (path := os.fspath(arguments[place])) in self.at:
            self.at[path] = time.perf_counter()
