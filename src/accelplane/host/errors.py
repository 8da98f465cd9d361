"""What can go wrong with a file of the node."""

import errno

_MISSING = frozenset((errno.ENOENT, errno.ENODEV, errno.ENXIO))


class HostError(Exception):
    """A file of the node cannot be read or written. The message has the path, and the found value or the operation.

    `errno` is the kernel's reason, 0 if the error is not the kernel's.
    """

    def __init__(self, path: str, problem: str, errno: int = 0) -> None:
        super().__init__(f"{path if path.isprintable() else ascii(path)}: {problem}")
        self.path = path
        self.problem = problem
        self.errno = errno


class Missing(HostError):
    """The file or directory does not exist."""


class Unreadable(HostError):
    """The file exists and cannot be used: no permission, an I/O error, too large, not text, a loop of links."""


class WriteError(HostError):
    """The kernel rejected a write."""


def host_error(path: str, error: OSError | ValueError) -> HostError:
    """The error of a call with `path`, as `Missing` or `Unreadable`."""
    if isinstance(error, ValueError):  # a zero byte, read from a file that names others
        return Unreadable(path, f"no path: {error}")
    reason = error.strerror or str(error)
    number = error.errno or 0
    return Missing(path, reason, number) if number in _MISSING else Unreadable(path, reason, number)
