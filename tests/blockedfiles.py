"""Files of a tree whose reads block, as those of sysfs do while the kernel holds the lock of their device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from accelplane.host import files


class BlockedFiles:
    """Reads of paths that end in one of the suffixes block. `waiting` has the paths of the reads that do."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self._released: dict[str, threading.Event] = {}

    def block(self, suffix: str) -> None:
        self._released[suffix] = threading.Event()

    def release(self, suffix: str) -> None:
        self._released.pop(suffix).set()

    def wait(self, path: str) -> None:
        for suffix, released in list(self._released.items()):
            if path.endswith(suffix):
                self.waiting.append(path)
                assert released.wait(120)
                self.waiting.remove(path)


@contextmanager
def blocked_files() -> Iterator[BlockedFiles]:
    blocked, read = BlockedFiles(), files._read

    def read_or_block(path: str, descriptor: int, limit: int) -> bytes:
        blocked.wait(path)
        return read(path, descriptor, limit)

    with patch.object(files, "_read", read_or_block):
        try:
            yield blocked
        finally:
            for suffix in list(blocked._released):
                blocked.release(suffix)
