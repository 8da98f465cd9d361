"""Files that survive a crash: written to another name, flushed to the disk, renamed, and the directory flushed.

A crash leaves the previous content or the new one, and maybe the temporary file, which the next write replaces and
`remove_temporary` removes.
"""

import contextlib
import os

from accelplane.descriptors import closing

_TEMPORARY = ".tmp"


def write(path: str, data: bytes, mode: int) -> None:
    """Replaces the file. The caller excludes other writers of this path. Raises `OSError`."""
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}{_TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with closing(os.open(temporary, flags, mode)) as descriptor:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _flush(directory)


def remove(path: str) -> None:
    """Removes the file if it exists. Raises `OSError`."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    _flush(os.path.dirname(path))


def move(path: str, target: str) -> None:
    """Renames a file within its directory. Raises `OSError`."""
    os.replace(path, target)
    _flush(os.path.dirname(target))


def remove_temporary(directory: str, prefix: str = "") -> None:
    """Removes what crashes have left of files whose names begin with `prefix`. Raises `OSError`."""
    for name in os.listdir(directory):
        if name.startswith(f".{prefix}") and name.endswith(_TEMPORARY):
            os.unlink(f"{directory}/{name}")


def _flush(directory: str) -> None:
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)
