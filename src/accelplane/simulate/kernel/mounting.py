"""A kernel's files where processes look for them: sysfs through FUSE, `/dev` as a real directory beside it.

with mounted(kernel, tmp_path) as root:
    Host(root).write("/sys/bus/pci/devices/0000:61:00.0/sriov_numvfs", "16")
"""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

from accelplane.simulate.journal import Journal, Nodes, Numbers
from accelplane.simulate.kernel.fuse import bound, served
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
        undo.enter_context(served(kernel, whole))
        undo.enter_context(bound(f"{whole}/sys", f"{top}/sys"))
        undo.enter_context(DeviceDirectory(kernel, top, device_nodes, numbers).kept())
        yield top
