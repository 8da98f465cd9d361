"""Settings of the C library's memory allocator for servers with large requests."""

import contextlib
import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD: Final = 128 * 1024
_TRIM_THRESHOLD: Final = 256 * 1024


def release_freed_memory() -> None:
    """Makes glibc return the memory of freed large requests to the kernel, see mallopt(3).

    By default the thresholds grow with the largest freed block: after a request of some megabytes, such blocks stay on
    the heap. Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
