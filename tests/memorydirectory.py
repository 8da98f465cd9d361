"""A directory in memory for the files of tests.

Creating and removing one file takes up to 0.8 ms of processor time on a disk, and 0.02 ms in memory. Sockets and nodes
that mount a `/dev` of their own have no place there.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "accelplane-tests-"
_MIN_FREE = 1024**3  # containers often have 64 MB
_UNSUITABLE = os.ST_RDONLY | os.ST_NOEXEC | os.ST_NODEV
_MAX_AGE = 24 * 3600


def is_suitable(status: os.statvfs_result) -> bool:
    """Returns whether the filesystem has room, and allows programs and device nodes."""
    return status.f_bavail * status.f_frsize >= _MIN_FREE and not status.f_flag & _UNSUITABLE


@contextmanager
def memory_directory(parent: Path = MEMORY) -> Iterator[Path | None]:
    """A new directory in `parent`, or None if `parent` does not exist or is not suitable.

    It is removed at the end if it is empty. A later run removes it one day after the last change.
    """
    directory = _new_directory(parent)
    yield directory
    if directory:
        with suppress(OSError):
            directory.rmdir()


def _new_directory(parent: Path) -> Path | None:
    try:
        if not is_suitable(os.statvfs(parent)):
            return None
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError:
        return None
    for old in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - _MAX_AGE:
                shutil.rmtree(old, ignore_errors=True)
    return directory
