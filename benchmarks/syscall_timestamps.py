"""Timestamps of the system calls with which this process creates or removes paths.

The simulated node makes other calls before and after the relevant one. CPython reports each call to audit hooks
(PEP 578) before it makes the call. Audit hooks cannot be removed.
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
        sys.addaudithook(self._on_audit_event)

    def _on_audit_event(self, event: str, arguments: Sequence[Any]) -> None:
        index = _TARGET.get(event)
        if index is not None and (path := os.fspath(arguments[index])) in self.at:
            self.at[path] = time.perf_counter()
