"""Queries of tests to the emulated kernel."""

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.model import Directory, Link


def refusal(kernel: Kernel, path: str, text: str) -> int:
    """The errno of a write, 0 for success."""
    try:
        kernel.write(path, text)
    except OSError as error:
        return error.errno or -1
    return 0


def dangling(kernel: Kernel) -> list[str]:
    """The dangling links, of which there should be none."""
    return [path for path, entry in kernel.tree.walk() if isinstance(entry, Link) and not kernel.exists(path)]


def attributes(kernel: Kernel, below: str = "/sys") -> list[str]:
    """All files by their path without links."""
    return [path for path, entry in kernel.tree.walk(below) if not isinstance(entry, Link | Directory)]
