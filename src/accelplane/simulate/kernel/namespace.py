"""A private mount namespace for a command, whose `/sys` and `/dev` are those of the emulated kernel.

Everything else is the real machine. The namespace ends with the process.
"""

import ctypes
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from accelplane.simulate.kernel.fuse import FuseUnavailable, bind_mount, mount, unmount
from accelplane.simulate.kernel.ioctls import serve_ioctls
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.mounting import mount_at

_NEW_MOUNTS = 0x00020000
_PRIVATE, _RECURSIVE, _NO_SUID = 1 << 18, 1 << 14, 1 << 1
_SHARED: Sequence[str] = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "console", "fuse")


@contextmanager
def emulated_namespace(kernel: Kernel) -> Generator[str, None, None]:
    """Moves this process into such a namespace. Yields the path of the socket that serves its ioctls.

    Must be called before threads are started. Raises `FuseUnavailable` and `OSError`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise FuseUnavailable(f"no mount namespace: {os.strerror(ctypes.get_errno())}; this needs root (CAP_SYS_ADMIN)")
    with ExitStack() as undo:
        mount("none", "/", "", _PRIVATE | _RECURSIVE, "")
        place = undo.enter_context(tempfile.TemporaryDirectory(prefix="accelplane-machine-"))
        devices, sockets = f"{place}/dev", f"{place}/ioctls"
        os.mkdir(devices)
        mount("accelplane", devices, "tmpfs", _NO_SUID, "mode=755")
        undo.callback(unmount, devices)
        for name in _SHARED:
            _bind_device(undo, f"/dev/{name}", f"{devices}/{name}")
        os.symlink("/proc/self/fd", f"{devices}/fd")
        undo.enter_context(mount_at(kernel, place, device_nodes="char"))
        undo.enter_context(serve_ioctls(kernel, sockets))
        for directory in ("dev", "sys"):
            undo.enter_context(bind_mount(f"{place}/{directory}", f"/{directory}"))
        yield sockets


def _bind_device(undo: ExitStack, real: str, target: str) -> None:
    if os.path.islink(real):
        os.symlink(os.readlink(real), target)
    elif os.path.isdir(real):
        os.mkdir(target)
        undo.enter_context(bind_mount(real, target))
    elif os.path.exists(real):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        undo.enter_context(bind_mount(real, target))
