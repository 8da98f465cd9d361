"""The directory of locks and records, `/run/accelplane-fpga`: only root can create or open files there.

It is not below `/run/lock`, where every user can create files and could thereby prevent programming by root.
"""

import contextlib
import os
from collections.abc import Generator

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError
from accelplane.host import Host

STATE_DIRECTORY = "/run/accelplane-fpga"


class StateDirectoryError(FpgaError):
    """A user other than root can write the directory."""


@contextlib.contextmanager
def state_directory(host: Host) -> Generator[int]:
    """Opens the directory, which is created if missing.

    Raises `OSError` (also for a symbolic link), `HostError` or `StateDirectoryError`.
    """
    parent, name = os.path.split(STATE_DIRECTORY)
    path = f"{host.local(parent)}/{name}"  # the path without resolving links: a link is rejected
    os.makedirs(path, mode=0o700, exist_ok=True)
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise StateDirectoryError(
                f"{STATE_DIRECTORY}: found a directory of user {status.st_uid} with mode {status.st_mode & 0o7777:o}, "
                "expected one that only root can write; remove it"
            )
        yield descriptor
