"""A machine of one's own for a command: a mount namespace whose `/sys` and `/dev` are the emulated kernel's.

Whatever else the command does, it does on the real machine. All of it ends with the process.
"""

import ctypes
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from accelplane.simulate.kernel.control import Control
from accelplane.simulate.kernel.fuse import FuseUnavailable, bound, mount, served, unmount
from accelplane.simulate.kernel.ioctls import answered
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.mounting import DeviceDirectory

_NEW_MOUNTS = 0x00020000
_PRIVATE, _RECURSIVE, _NO_SUID = 1 << 18, 1 << 14, 1 << 1
_KEPT: Sequence[str] = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "console", "fuse")


@contextmanager
def alone(kernel: Kernel) -> Generator[str, None, None]:
    """Puts this process on such a machine until left; gives the socket at which its ioctls are answered.

    To be called before there are threads. Raises `FuseUnavailable` and `OSError`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise FuseUnavailable(f"no mount namespace: {os.strerror(ctypes.get_errno())}; this needs root (CAP_SYS_ADMIN)")
    with ExitStack() as undo:
        mount("none", "/", "", _PRIVATE | _RECURSIVE, "")
        place = undo.enter_context(tempfile.TemporaryDirectory(prefix="accelplane-machine-"))
        whole, devices, sockets = f"{place}/kernel", f"{place}/dev", f"{place}/ioctls"
        os.mkdir(whole)
        os.mkdir(devices)
        Control(kernel)
        undo.enter_context(served(kernel, whole))
        mount("accelplane", devices, "tmpfs", _NO_SUID, "mode=755")
        undo.callback(unmount, devices)
        for name in _KEPT:
            _keep(undo, f"/dev/{name}", f"{devices}/{name}")
        os.symlink("/proc/self/fd", f"{devices}/fd")
        undo.enter_context(answered(kernel, sockets))
        undo.enter_context(bound(devices, "/dev"))
        undo.enter_context(DeviceDirectory(kernel, "", "char", None).kept())
        undo.enter_context(bound(f"{whole}/sys", "/sys"))
        yield sockets


def _keep(undo: ExitStack, real: str, target: str) -> None:
    if os.path.islink(real):
        os.symlink(os.readlink(real), target)
    elif os.path.isdir(real):
        os.mkdir(target)
        undo.enter_context(bound(real, target))
    elif os.path.exists(real):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        undo.enter_context(bound(real, target))
