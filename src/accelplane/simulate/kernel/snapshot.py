"""Snapshots: the present state of a kernel as plain files, and plain files as part of a kernel."""

import os
import stat

from accelplane.simulate.journal import Journal, Nodes, Numbers
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, DeviceNode, Directory, Link, Tree, link_text, stored_value


def write_tree(
    kernel: Kernel,
    root: str | os.PathLike[str],
    *,
    device_nodes: Nodes = "files",
    numbers: tuple[int, int] | None = None,
) -> None:
    """Writes `/sys` and `/dev` of the kernel below `root`, in addition to existing files. Raises `TreeError`.

    Writes to the files have no effect. Attributes that cannot be read are empty files. The other
    parameters are those of `SimulatedNode`.
    """
    top = os.path.realpath(root)
    prefix = "" if top == "/" else top
    journal = Journal(prefix, device_nodes, numbers)
    os.makedirs(top, exist_ok=True)
    for path, entry in (*kernel.tree.walk("/sys"), *kernel.tree.walk("/dev")):
        if isinstance(entry, Attribute):
            try:
                content = kernel.read_attribute(path, entry)
            except OSError:
                content = b""
            with open(prefix + path, "wb") as file:
                file.write(content)
        else:
            create_entry(journal, prefix, path, entry)


def create_entry(journal: Journal, prefix: str, path: str, entry: Directory | DeviceNode | Link) -> None:
    """Creates a directory, node or link below `prefix`, which is that of the journal. Raises `TreeError`."""
    match entry:
        case Directory():
            os.makedirs(prefix + path, exist_ok=True)
        case DeviceNode(numbers=numbers):
            journal.node(path, numbers)
        case Link(target=target):
            journal.link_as(path, link_text(path, target))


def adopt_tree(tree: Tree, root: str | os.PathLike[str]) -> None:
    """Adds the files below `root` (`sys`, `dev`), such as GPUs of a `SimulatedNode`, as writable attributes.

    Existing entries of the tree stay. A plain file below `dev` becomes a device node with the numbers of `/dev/null`.
    """
    top = os.path.realpath(root)
    for directory, subdirectories, files in os.walk(top):
        path = directory.removeprefix(top)
        for name in (*subdirectories, *files):
            local, place = f"{directory}/{name}", f"{path}/{name}"
            status = os.lstat(local)
            if stat.S_ISLNK(status.st_mode):
                if not tree.has(place):
                    tree.link(place, os.path.normpath(os.path.join(path, os.readlink(local))))
            elif stat.S_ISDIR(status.st_mode):
                tree.directory(place)
            elif path.startswith("/dev"):
                device = status.st_rdev if stat.S_ISCHR(status.st_mode) else os.makedev(1, 3)
                tree.put(place, DeviceNode(Numbers(os.major(device), os.minor(device))))
            elif not tree.has(place):
                with open(local, encoding="utf-8", errors="surrogateescape") as file:
                    tree.put(place, stored_value(file.read(), raw=True))
