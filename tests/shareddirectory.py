"""A directory in memory that all processes of a test run share.

Creating a file takes a tenth of the time there, and what many tests read is built once for all workers of xdist.
Programs that bind sockets with long paths, or that mount their own /dev, need directories elsewhere.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ACCELPLANE_TEST_DIRECTORY"
_MEMORY = Path("/dev/shm")
# Containers often have 64 MiB, which is too little.
_MIN_FREE = 512 << 20


def create() -> Callable[[], None]:
    """Creates the directory, unless the calling process has it from its parent. Returns the function that removes it.

    It is in the default directory for temporary files if there is not enough memory.
    """
    if VARIABLE in os.environ:
        return lambda: None
    path = tempfile.mkdtemp(prefix="accelplane-", dir=_MEMORY if _has_room(_MEMORY) else None)
    os.environ[VARIABLE] = path

    def remove() -> None:
        del os.environ[VARIABLE]
        shutil.rmtree(path, ignore_errors=True)

    return remove


def _has_room(directory: Path) -> bool:
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= _MIN_FREE


def path() -> Path:
    """The directory."""
    return Path(os.environ[VARIABLE])


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The directory `name`, which `build` fills in the first process that needs it. Others wait for it.

    Tests must not change it.
    """
    directory = path() / name
    with (path() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            part = path() / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(directory)
    return directory
