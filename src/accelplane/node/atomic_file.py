"""Small files that other programs read. They are replaced atomically, so a reader never sees half of one."""

import contextlib
import os
import tempfile
from typing import TypeAlias

from accelplane.descriptors import read_limited

# Inode, size and time of modification: differs between a file and its later content.
Stamp: TypeAlias = tuple[int, int, int]


def replace(path: str, data: bytes, prefix: str, mode: int = 0o644) -> None:
    """Writes `data` to a new file `<prefix>*.tmp` in the same directory and renames it to `path`. Raises `OSError`."""
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def content(path: str, limit: int, *, follow: bool = False) -> bytes | None:
    """The file's content; None if it cannot be read, is no regular file, has more than `limit` bytes, or is a symbolic
    link and `follow` is false. Never blocks, whatever kind of file it is."""
    try:
        return read_limited(path, limit, follow=follow)
    except OSError:
        return None


def stamp_of(path: str, *, follow: bool = False) -> Stamp | None:
    """The stamp of the file at `path`, None if there is none."""
    try:
        status = os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
