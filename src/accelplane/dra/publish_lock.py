"""The lock of the instance that writes a driver's slices: flock(2) of `publish.lock` in the driver's directory."""

import fcntl
import os

FILE_NAME = "publish.lock"


class PublishLock:
    """Held by at most one process. A process that ends releases it."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, FILE_NAME)
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Whether this process holds the lock now. Does not wait. Raises `OSError` if the file cannot be used."""
        if self._descriptor is not None:
            return True
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
