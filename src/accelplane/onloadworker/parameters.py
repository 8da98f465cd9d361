"""The two parameters of the kernel module onload that name the control plane server.

The module trims white space. An empty path stands for `/sbin/onload_cp_server`. A changed value starts the server at
once, therefore the arguments are written before the path: otherwise the new program runs with the old arguments.
"""

from typing import NamedTuple

from accelplane.host import Host, HostError
from accelplane.onloadworker.configuration import WorkerError

MODULE = "/sys/module/onload"
PATH = f"{MODULE}/parameters/cplane_server_path"
ARGUMENTS = f"{MODULE}/parameters/cplane_server_params"


class Values(NamedTuple):
    path: str
    arguments: str


DEFAULTS = Values("", "")
_UNSET = "(null)"  # how the kernel shows a text parameter without a value


def module_instance(root: str) -> tuple[int, int] | None:
    """Identifies the loaded module: another value after it was loaded again, None while it is not ready."""
    files = Host(root)
    try:
        if files.optional_text(f"{MODULE}/initstate") not in (None, "live"):
            return None
    except HostError:
        return None
    status = files.status(f"{MODULE}/parameters")
    return None if status is None else (status.st_dev, status.st_ino)


def read(root: str) -> Values:
    """The current values. Raises `HostError`."""
    files = Host(root)
    path, arguments = (files.text(file).removeprefix(_UNSET) for file in (PATH, ARGUMENTS))
    return Values(path, arguments)


def write(root: str, values: Values) -> None:
    """Writes values that differ and reads them again. Raises `HostError`, or `WorkerError` if they have no effect."""
    files = Host(root)
    for file, text in ((ARGUMENTS, values.arguments), (PATH, values.path)):
        if files.text(file) != text:
            files.write(file, text or "\n")  # a write of no bytes does not reach the module
    found = read(root)
    if found != values:
        raise WorkerError(f"{MODULE}/parameters: found {_format(found)} after a write, expected {_format(values)}")


def final_values(previous: Values) -> Values:
    """The values for the end of the worker: the previous ones, unless they are of another worker that has crashed."""
    return DEFAULTS if previous.arguments.startswith("exec ") else previous


def _format(values: Values) -> str:
    return f"{values.path[:200]!a} with {values.arguments[:400]!a}"
