"""Memory and processor time of another process."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct


class Memory(Struct, frozen=True):
    """Resident memory of a process, in MiB."""

    resident: float
    anonymous: float
    peak: float


def memory_of(process: int) -> Memory:
    """The memory of a process and its peak, from the kernel."""
    text = Path(f"/proc/{process}/status").read_text()
    found: Mapping[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return Memory(*(int(found[name]) / 1024 for name in ("VmRSS", "RssAnon", "VmHWM")))


def cpu_seconds(process: int) -> float:
    """The processor time of a process."""
    return time.clock_gettime(~process << 3 | 2)
