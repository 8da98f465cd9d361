"""What tests of the emulated kernel ask it."""

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.model import Directory, Link


def refusal(kernel: Kernel, path: str, text: str) -> int:
    """The errno that a write gets, 0 when it is taken."""
    try:
        kernel.write(path, text)
    except OSError as error:
        return error.errno or -1
    return 0


def dangling(kernel: Kernel) -> list[str]:
    """The links that lead nowhere; there should never be one."""
    return [path for path, entry in kernel.tree.walk() if isinstance(entry, Link) and not kernel.exists(path)]


def attributes(kernel: Kernel, below: str = "/sys") -> list[str]:
    """Every file there is, by its one path without links."""
    return [path for path, entry in kernel.tree.walk(below) if not isinstance(entry, Link | Directory)]
