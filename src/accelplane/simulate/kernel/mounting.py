"""Mounts of a kernel's files: sysfs through FUSE, and `/dev` as a real directory.

with mount_at(kernel, tmp_path) as root:
    Host(root).write("/sys/bus/pci/devices/0000:61:00.0/sriov_numvfs", "16")
"""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress

from accelplane.simulate.journal import Journal, Nodes
from accelplane.simulate.kernel.control import CONTROL, Control
from accelplane.simulate.kernel.fuse import FuseUnavailable, bind_mount, serve_fuse
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, Entry
from accelplane.simulate.kernel.snapshot import create_entry


class DeviceDirectory:
    """Synchronizes `/dev` below `prefix` with the device nodes of the kernel."""

    def __init__(self, kernel: Kernel, prefix: str, device_nodes: Nodes, numbers: tuple[int, int] | None) -> None:
        self._kernel = kernel
        self._prefix = prefix
        self._journal = Journal(prefix, device_nodes, numbers)

    @contextmanager
    def synchronize(self) -> Generator[None, None, None]:
        """Synchronizes the directory, and removes the created entries at the end. Raises `TreeError`."""
        tree = self._kernel.tree
        os.makedirs(f"{self._prefix}/dev", exist_ok=True)
        with self._kernel.lock:
            for path, entry in tree.walk("/dev"):
                self._update(path, entry)
            tree.watchers.append(self._update)
        try:
            yield
        finally:
            with self._kernel.lock:
                tree.watchers.remove(self._update)
                for path, _entry in reversed(list(tree.walk("/dev"))):
                    self._remove(path)

    def _update(self, path: str, entry: Entry | None) -> None:
        if not path.startswith("/dev/"):
            return
        if entry is None:
            self._remove(path)
        elif not isinstance(entry, Attribute):
            create_entry(self._journal, self._prefix, path, entry)

    def _remove(self, path: str) -> None:
        local = self._prefix + path
        try:
            os.unlink(local)
        except IsADirectoryError:
            with suppress(OSError):  # not empty
                os.rmdir(local)
        except FileNotFoundError:
            return


@contextmanager
def mount_at(
    kernel: Kernel,
    root: str | os.PathLike[str],
    *,
    device_nodes: Nodes = "files",
    numbers: tuple[int, int] | None = None,
) -> Generator[str, None, None]:
    """Mounts `sys` and `dev` of the kernel below `root`. Yields the root, which can be used with `Host`.

    The other parameters are those of `SimulatedNode`. Raises `FuseUnavailable`.
    """
    top = os.path.realpath(root)
    mount_point = f"{top}/.kernel"
    for directory in (mount_point, f"{top}/sys"):
        os.makedirs(directory, exist_ok=True)
    with ExitStack() as undo:
        undo.callback(kernel.tree.remove, CONTROL)
        Control(kernel)
        undo.enter_context(serve_fuse(kernel, mount_point))
        undo.enter_context(bind_mount(f"{mount_point}/sys", f"{top}/sys"))
        undo.enter_context(DeviceDirectory(kernel, top, device_nodes, numbers).synchronize())
        yield top


# Directories that also have entries of the host: only the emulated entries in them are mounted.
_SHARED = ("/sys/bus", "/sys/class", "/sys/devices", "/sys/devices/virtual", "/sys/kernel", "/sys/module")
_NODES = "/sys/devices/system/node"


def parts(kernel: Kernel) -> list[str]:
    """The directories to mount, which together contain all entries of the kernel below `/sys`."""
    tree = kernel.tree
    with kernel.lock:
        shared = [path for path in _SHARED if path not in kernel.mounted_directories]
        excluded = {*shared, "/sys/devices/system"}
        found = [f"{path}/{name}" for path in shared if tree.has(path) for name in tree.names(path)]
        nodes = [f"{_NODES}/{name}/x86" for name in (tree.names(_NODES) if tree.has(_NODES) else [])]
        others = (*nodes, *kernel.mounted_directories, "/sys/dev/char")
        return [path for path in (*found, *others) if path not in excluded and tree.has(path)]


@contextmanager
def mount_over(
    kernel: Kernel, mount_point: str, *, numbers: tuple[int, int] | None = None
) -> Generator[Callable[[], None], None, None]:
    """Mounts the kernel over the real paths of this mount namespace; `mount_point` is for the complete tree.

    Every part is mounted over the directory of its name, which is created if missing. Yields a function that mounts
    parts added since. It must not be called from a listener of uevents, because it accesses the mount.
    Raises `FuseUnavailable` and `TreeError`.
    """
    if _is_host_sysfs("/sys"):
        raise FuseUnavailable("/sys is that of the host; run in a mount namespace with another /sys")
    os.makedirs(mount_point, exist_ok=True)
    over: set[str] = set()
    with ExitStack() as undo:

        def cover() -> None:
            for part in parts(kernel):
                # NUMA nodes that the host lacks would have no processors.
                if part not in over and (not part.startswith(_NODES) or os.path.isdir(os.path.dirname(part))):
                    over.add(part)
                    os.makedirs(part, exist_ok=True)
                    undo.enter_context(bind_mount(mount_point + part, part))

        undo.enter_context(serve_fuse(kernel, mount_point))
        cover()
        undo.enter_context(DeviceDirectory(kernel, "", "char", numbers).synchronize())
        yield cover


def _is_host_sysfs(path: str) -> bool:
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        kinds = [words[2] for line in mounts if len(words := line.split()) > 2 and words[1] == path]
    return kinds[-1:] == ["sysfs"]
