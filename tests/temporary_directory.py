"""Prints the directory for the temporary files of `make test`.

A run makes more than 100,000 small files, which takes a disk half a minute or more. They are in memory if `TMPDIR` does
not say otherwise and `/dev/shm` has room and allows programs and device nodes; in containers it often has 64 MB.
"""

import os
import tempfile

_MEMORY = "/dev/shm"
_MIN_FREE = 2 * 1024**3
_UNSUITABLE = os.ST_RDONLY | os.ST_NOEXEC | os.ST_NODEV


def directory() -> str:
    if "TMPDIR" not in os.environ:
        try:
            status = os.statvfs(_MEMORY)
        except OSError:
            return tempfile.gettempdir()
        if status.f_bavail * status.f_frsize >= _MIN_FREE and not status.f_flag & _UNSUITABLE:
            return _MEMORY
    return tempfile.gettempdir()


if __name__ == "__main__":
    print(directory())
