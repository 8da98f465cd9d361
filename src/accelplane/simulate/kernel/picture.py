"""A kernel's present state as plain files below a directory, for tests and demos without root."""

import os

from accelplane.simulate.journal import Journal, Nodes, Numbers
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, DeviceNode, Directory, link_text


def write_tree(
    kernel: Kernel,
    root: str | os.PathLike[str],
    *,
    device_nodes: Nodes = "files",
    numbers: tuple[int, int] | None = None,
) -> None:
    """Writes `/sys` and `/dev` of the kernel below `root`, beside what is there. Raises `TreeError`.

    Every attribute can be written to, and nothing happens; one that cannot be read just now is an empty file. The
    other parameters are those of `SimulatedNode`.
    """
    top = os.path.realpath(root)
    prefix = "" if top == "/" else top
    journal = Journal(prefix, device_nodes, Numbers(*numbers) if numbers else None)
    os.makedirs(top, exist_ok=True)
    for path, entry in (*kernel.tree.walk("/sys"), *kernel.tree.walk("/dev")):
        if isinstance(entry, Directory):
            os.makedirs(prefix + path, exist_ok=True)
        elif isinstance(entry, Attribute):
            try:
                content = kernel.read_attribute(path, entry)
            except OSError:
                content = b""
            with open(prefix + path, "wb") as file:
                file.write(content)
        elif isinstance(entry, DeviceNode):
            journal.node(path, entry.numbers)
        else:
            journal.link_as(path, link_text(path, entry.target))
