"""Processes, socket and limits of a service of `accelplane clients`."""

from pathlib import Path

from accelplane.gpuclients.walk import Limits

PLENTY = Limits(cpu=60.0)


def proc_directory(tmp_path: Path) -> Path:
    """A fixture: the directory of the processes."""
    return tmp_path / "proc"


def socket_path(directory: str) -> str:
    """A fixture: the path of the socket."""
    return f"{directory}/clients.sock"
