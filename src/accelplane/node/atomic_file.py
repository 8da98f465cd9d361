"""Small files that other programs read. They are replaced atomically, so a reader never sees half of one."""

import contextlib
import os
import stat
import tempfile


def replace(path: str, data: bytes, prefix: str, mode: int = 0o644) -> None:
    """Writes `data` to a temporary file `<prefix>*.tmp` in the same directory and renames it to `path`.

    Raises `OSError`.
    """
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
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = os.read(descriptor, limit + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data if len(data) <= limit else None
