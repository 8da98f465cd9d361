"""A `Host` over the emulated kernel in memory: reads and writes of provisioning go to an emulated kernel.

`writes` has all writes, `open_groups` the VFIO groups in use (`/dev/vfio/12`), and `refused` has
writes that fail once, with an errno. It has only the methods that planners, the engine and
driver binding call.
"""

import errno
import os
import stat

from accelplane.host import Host, Missing, Unreadable, WriteError
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, Link

_MISSING = (errno.ENOENT, errno.ENODEV, errno.ENXIO)


def snapshot(kernel: Kernel) -> dict[str, str]:
    """All sysfs attributes of devices and drivers."""
    found: dict[str, str] = {}
    for top in ("/sys/devices", "/sys/bus"):
        for path, entry in kernel.tree.walk(top):
            if isinstance(entry, Link):
                found[path] = entry.target
            elif isinstance(entry, Attribute) and entry.mode & 0o444:
                try:
                    found[path] = entry.content().decode()
                except OSError as error:
                    found[path] = str(error.errno)
    return found


class KernelHost(Host):
    def __init__(self, kernel: Kernel, writes: list[tuple[str, str]]) -> None:
        super().__init__("/nowhere")
        self.kernel = kernel
        self.writes = writes
        self.open_groups: set[str] = set()
        self.refused: list[tuple[str, str, int]] = []

    def raw_text(self, path: str) -> str:
        try:
            return self.kernel.read_bytes(path).decode()
        except UnicodeDecodeError:
            raise Unreadable(path, "not text") from None
        except OSError as error:
            raise self._why(path, error) from None

    def text(self, path: str) -> str:
        return self.raw_text(path).strip()

    def write(self, path: str, text: str) -> None:
        for refusal in self.refused:
            if refusal[:2] == (path, text):
                self.refused.remove(refusal)
                raise WriteError(path, f"{os.strerror(refusal[2])} (writing {text!a})", refusal[2])
        try:
            self.kernel.write(path, text)
        except OSError as error:
            problem = self._why(path, error)
            if isinstance(problem, Missing):
                raise problem from None
            raise WriteError(path, f"{problem.problem} (writing {text!a})", problem.errno) from None
        self.writes.append((path, text))

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if path in self.open_groups:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # of open(2) for a group that is open
        return super().open(path, flags, mode)

    def names(self, path: str) -> list[str]:
        try:
            return self.kernel.list(path)
        except OSError as error:
            raise self._why(path, error) from None

    def link(self, path: str) -> str:
        try:
            return self.kernel.readlink(path)
        except OSError as error:
            raise self._why(path, error) from None

    def resolve(self, path: str) -> str:
        try:
            return self.kernel.resolve(path)
        except OSError:
            return path

    def status(self, path: str) -> os.stat_result | None:
        if not self.kernel.exists(path):
            return None
        return os.stat_result((stat.S_IFREG | 0o644, *[0] * 9))

    def _why(self, path: str, error: OSError) -> Missing | Unreadable:
        kind = Missing if error.errno in _MISSING else Unreadable
        return kind(path, os.strerror(error.errno or 0), error.errno or 0)
