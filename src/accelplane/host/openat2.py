"""Opens a directory below another one with one system call, without following links: openat2(2), since Linux 5.6.

Python has no function for it. ctypes is imported with the first call, because short-lived commands do not need it.
"""

import os
import struct
from collections.abc import Callable
from functools import cache

_NUMBER = 437  # of the system call, the same on all architectures of this project
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08  # linux/openat2.h
# struct open_how: flags, mode, resolve
_HOW = struct.pack("QQQ", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)


def open_directory(descriptor: int, path: str) -> int:
    """An O_PATH descriptor of the directory at a relative path below `descriptor`.

    -1 if there is none, if a component is a link, or if the kernel or a seccomp filter does not allow the call.
    """
    return -1 if "\0" in path else _function()(_NUMBER, descriptor, os.fsencode(path), _HOW, len(_HOW))


@cache
def _function() -> Callable[..., int]:
    """The function syscall(2) of the C library."""
    import ctypes  # noqa: PLC0415 - see above

    function = ctypes.CDLL(None).syscall
    function.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    function.restype = ctypes.c_long
    return function
