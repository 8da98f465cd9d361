"""The emulated kernel's file system at a mount point, for tests that are skipped with the reason if nothing can be
mounted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.fuse import FuseUnavailable
from accelplane.simulate.kernel.mounting import mount_at


@contextmanager
def mounted_for_test(kernel: Kernel, directory: Path) -> Iterator[Path]:
    """The mount point of the kernel's /sys and /dev, which is unmounted at the end."""
    with ExitStack() as undo:
        try:
            root = undo.enter_context(mount_at(kernel, directory))
        except FuseUnavailable as error:
            pytest.skip(f"no FUSE: {error}")
        yield Path(root)
    assert str(directory) not in Path("/proc/self/mounts").read_text()
