"""A kernel's files where processes look for them: sysfs through FUSE, `/dev` as a real directory beside it.

with mounted(kernel, tmp_path) as root:
    Host(root).write("/sys/bus/pci/devices/0000:61:00.0/sriov_numvfs", "16")
"""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress

from accelplane.simulate.journal import Journal, Nodes, Numbers
from accelplane.simulate.kernel.control import CONTROL, Control
from accelplane.simulate.kernel.fuse import FuseUnavailable, bound, served
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import DeviceNode, Directory, Entry, Link, link_text


class DeviceDirectory:
    """Keeps `/dev` below `prefix` as the kernel has it: made and removed as its devices come and go."""

    def __init__(self, kernel: Kernel, prefix: str, device_nodes: Nodes, numbers: tuple[int, int] | None) -> None:
        self._kernel = kernel
        self._prefix = prefix
        self._journal = Journal(prefix, device_nodes, Numbers(*numbers) if numbers else None)

    @contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Keeps it until left, and then takes away what it made. Raises `TreeError`."""
        tree = self._kernel.tree
        os.makedirs(f"{self._prefix}/dev", exist_ok=True)
        with self._kernel.lock:
            for path, entry in tree.walk("/dev"):
                self._put(path, entry)
            tree.watchers.append(self._changed)
        try:
            yield
        finally:
            with self._kernel.lock:
                tree.watchers.remove(self._changed)
                for path, _entry in reversed(list(tree.walk("/dev"))):
                    self._remove(path)

    def _changed(self, path: str, entry: Entry | None) -> None:
        if path.startswith("/dev/"):
            if entry is None:
                self._remove(path)
            else:
                self._put(path, entry)

    def _put(self, path: str, entry: Entry) -> None:
        if isinstance(entry, Directory):
            os.makedirs(self._prefix + path, exist_ok=True)
        elif isinstance(entry, DeviceNode):
            self._journal.node(path, entry.numbers)
        elif isinstance(entry, Link):
            self._journal.link_as(path, link_text(path, entry.target))

    def _remove(self, path: str) -> None:
        local = self._prefix + path
        try:
            os.unlink(local)
        except IsADirectoryError:
            with suppress(OSError):  # others have something in it
                os.rmdir(local)
        except FileNotFoundError:
            return


@contextmanager
def mounted(
    kernel: Kernel,
    root: str | os.PathLike[str],
    *,
    device_nodes: Nodes = "files",
    numbers: tuple[int, int] | None = None,
) -> Generator[str, None, None]:
    """`sys` and `dev` of the kernel below `root` until left; gives the root. It is a root for `Host`.

    The other parameters are those of `SimulatedNode`. Raises `FuseUnavailable`.
    """
    top = os.path.realpath(root)
    whole = f"{top}/.kernel"
    for directory in (whole, f"{top}/sys"):
        os.makedirs(directory, exist_ok=True)
    with ExitStack() as undo:
        undo.callback(kernel.tree.remove, CONTROL)
        Control(kernel)
        undo.enter_context(served(kernel, whole))
        undo.enter_context(bound(f"{whole}/sys", f"{top}/sys"))
        undo.enter_context(DeviceDirectory(kernel, top, device_nodes, numbers).kept())
        yield top


# What a real /sys has beside our entries: these are laid over it one by one.
_SHARED = ("/sys/bus", "/sys/class", "/sys/devices", "/sys/devices/virtual", "/sys/kernel", "/sys/module")
_NODES = "/sys/devices/system/node"


def parts(kernel: Kernel) -> list[str]:
    """The directories that are the kernel's alone, which together are all that it has below `/sys`."""
    tree = kernel.tree
    with kernel.lock:
        shared = [path for path in _SHARED if path not in kernel.whole_directories]
        found = [f"{path}/{name}" for path in shared if tree.has(path) for name in tree.names(path)]
        nodes = [f"{_NODES}/{name}/x86" for name in (tree.names(_NODES) if tree.has(_NODES) else [])]
        others = (*nodes, *kernel.whole_directories, "/sys/dev/char")
        return [path for path in (*found, *others) if path not in shared and _own(path, kernel)]


def _own(path: str, kernel: Kernel) -> bool:
    return path != "/sys/devices/system" and kernel.tree.has(path)


@contextmanager
def laid_over(
    kernel: Kernel, whole: str, *, numbers: tuple[int, int] | None = None
) -> Generator[Callable[[], None], None, None]:
    """The kernel at the real paths of this mount namespace until left; `whole` is a directory for all of it.

    Every part is mounted over the directory of its name, which is made when missing. Gives a function that does the
    same for parts that are new since; it must not be called from a uevent's listener, for it looks into the mount.
    Raises `FuseUnavailable` and `TreeError`.
    """
    if _is_the_machines_own("/sys"):
        raise FuseUnavailable("/sys is the machine's own here; run in a mount namespace with another one")
    os.makedirs(whole, exist_ok=True)
    over: set[str] = set()
    with ExitStack() as undo:

        def cover() -> None:
            for part in parts(kernel):
                # A NUMA node that the machine has not would be one without processors.
                if part not in over and (not part.startswith(_NODES) or os.path.isdir(os.path.dirname(part))):
                    over.add(part)
                    os.makedirs(part, exist_ok=True)
                    undo.enter_context(bound(whole + part, part))

        undo.enter_context(served(kernel, whole))
        cover()
        undo.enter_context(DeviceDirectory(kernel, "", "char", numbers).kept())
        yield cover


def _is_the_machines_own(path: str) -> bool:
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        kinds = [words[2] for line in mounts if len(words := line.split()) > 2 and words[1] == path]
    return kinds[-1:] == ["sysfs"]
