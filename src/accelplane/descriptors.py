"""File descriptors that a block closes, and small files that are read within a limit.

Imports only the standard library, because hooks of the container runtime use it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Generator


@contextlib.contextmanager
def closing(descriptor: int) -> Generator[int]:
    """Closes the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_limited(path: str | os.PathLike[str], limit: int, *, follow: bool = True, regular: bool = True) -> bytes:
    """Returns the content of a regular file, which a symbolic link may lead to with `follow`. Never blocks.

    Without `regular` it may also be a pipe or a device; the content of a pipe is what has been written to it by now.

    Raises `OSError`, also for another kind of file, for more than `limit` bytes, and for a path with a zero byte. Its
    `strerror` is the reason.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from None
    with closing(descriptor), open(descriptor, "rb", closefd=False) as file:
        if regular and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        data = file.read(limit + 1) or b""
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
    return data
