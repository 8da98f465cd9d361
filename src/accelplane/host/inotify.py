"""inotify(7) for directories: entries that are created, deleted, moved or written."""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

WRITTEN = 0x8  # IN_CLOSE_WRITE
COME_OR_GONE = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800  # MOVED_FROM, MOVED_TO, CREATE, DELETE, *_SELF
_OVERFLOW = 0x4000
_IGNORED = 0x8000
_ONLYDIR = 0x0100_0000
_MASK_ADD = 0x2000_0000
_EVENT = struct.Struct("iIII")


class InotifyEvent(NamedTuple):
    """`watch` is the number that `add` returned, -1 if events were lost; `name` the entry, empty for the directory.

    `removed`: the kernel removed the watch with its directory. `written`: an entry's content may have changed; none was
    created or deleted.
    """

    watch: int
    name: str
    removed: bool
    written: bool


class Inotify:
    """One inotify instance. Raises `OSError`, for example at the limit of instances."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")

    def fileno(self) -> int:
        return self._descriptor

    def add(self, directory: str, mask: int = COME_OR_GONE) -> int:
        """Watches a directory, or adds to its mask. Returns a number that all of its paths have. Raises `OSError`."""
        path = os.fsencode(directory)
        if b"\0" in path:
            raise OSError(errno.EINVAL, "zero byte in path", directory)
        return self._check(
            self._libc.inotify_add_watch(self._descriptor, path, ctypes.c_uint32(mask | _ONLYDIR | _MASK_ADD)),
            directory,
        )

    def remove(self, watch: int) -> None:
        """Removes a watch; no-op if the kernel has removed it."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def read(self) -> Iterator[InotifyEvent]:
        """The pending events."""
        try:
            data = os.read(self._descriptor, 64 * 1024)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            watch, mask, _cookie, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
            offset += length
            yield InotifyEvent(
                -1 if mask & _OVERFLOW else watch, name, removed=bool(mask & _IGNORED), written=bool(mask & WRITTEN)
            )

    def close(self) -> None:
        os.close(self._descriptor)

    def _check(self, result: int, subject: str) -> int:
        if result < 0:
            code = ctypes.get_errno()
            limited = code in (errno.EMFILE, errno.ENOSPC)
            hint = "; raise fs.inotify.max_user_instances or max_user_watches" if limited else ""
            raise OSError(code, os.strerror(code) + hint, subject)
        return result
