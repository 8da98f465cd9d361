"""Small files that others read: replaced in one step, so that nobody ever sees half of one."""

import contextlib
import os
import stat
import tempfile


def replace(path: str, data: bytes, prefix: str, mode: int = 0o644) -> None:
    """Makes `path` a file that holds `data`; meanwhile a file `<prefix>*.tmp` lies beside it.

    Raises `OSError`.
    """
    descriptor, passing = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
        os.replace(passing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise


def content(path: str, limit: int, *, follow: bool = False) -> bytes | None:
    """What the file holds; None when it cannot be read, is no regular file, has more than `limit` bytes, or is a link
    that is not to be followed. Never waits, whatever lies there."""
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
