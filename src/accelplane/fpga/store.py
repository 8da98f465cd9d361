"""The bitstream store of a node: `/srv/intel.com/fpga/<interface id>/<unique id>.gbs` or `.aocx`.

Ids of a lookup come from a container's environment, so they are validated before they become part of a path. Links out
of the store are rejected; links within it are followed. Files are installed atomically, by a rename.
"""

import contextlib
import os
from collections.abc import Generator
from contextlib import AbstractContextManager

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import EXTENSIONS, Bitstream, open_bitstream
from accelplane.fpga.ids import IdError, requested_id
from accelplane.host import Host

STORE = "/srv/intel.com/fpga"

_COPIED_AT_ONCE = 1024 * 1024


def install_path(bitstream: Bitstream, store: str = STORE) -> str:
    """Returns the path of the bitstream in the store, empty if it has no valid ids."""
    try:
        return _path(store, bitstream.interface, bitstream.unique, bitstream.extension)
    except IdError:
        return ""


def find(host: Host, region: str, afu: str, store: str = STORE) -> str:
    """Returns the path of the bitstream of `afu` for the region; GBS before AOCX. Raises `FpgaError`."""
    for extension in EXTENSIONS:
        path = _path(store, region, afu, extension)
        try:
            os.stat(host.local(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise FpgaError(f"{path}: {error.strerror}") from None
        home, found = host.resolve(store), host.resolve(path)
        if not found.startswith(f"{home}/"):
            raise FpgaError(f"{path}: resolves to {found}, expected a file within the store")
        return path
    tried = " nor ".join(_path(store, region, afu, extension) for extension in EXTENSIONS)
    raise FpgaError(f"no bitstream for AFU {afu} in region {region}: found neither {tried}; use fpga_tool install")


def open_installed(host: Host, region: str, afu: str, store: str = STORE) -> AbstractContextManager[Bitstream]:
    """Opens the bitstream that `find` returns. Raises `FpgaError`."""
    return open_bitstream(find(host, region, afu, store), host.open)


def install(host: Host, bitstream: Bitstream, store: str = STORE, *, force: bool = False, dry_run: bool = False) -> str:
    """Copies the file into the store and returns its path. Overwrites an existing file only with `force`.

    Raises `FpgaError`, also for a damaged file.
    """
    path = install_path(bitstream, store)
    if not path:
        raise FpgaError(
            f"{bitstream.path}: cannot install: interface id is {bitstream.interface!a} and unique id "
            f"{bitstream.unique!a}; expected 8 to 40 hexadecimal digits each"
        )
    bitstream.size()  # decompresses all of it
    try:
        directory, _, name = path.rpartition("/")
        local = f"{host.local(directory)}/{name}"  # a link at the path itself is replaced, not followed
        if not force and os.path.lexists(local):
            raise FileExistsError
        if not dry_run:
            _make_directories(os.path.dirname(local))
            _copy(bitstream.descriptor, local, force=force)
    except FileExistsError:
        raise FpgaError(f"{path}: file exists; use -force to overwrite it") from None
    except OSError as error:
        raise FpgaError(f"{path}: cannot install: {error.strerror}") from None
    return path


@contextlib.contextmanager
def lock(directory: str) -> Generator[int]:
    """Opens the directory and locks it against other installing processes."""
    import fcntl  # noqa: PLC0415 - only to install

    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        with contextlib.suppress(OSError):  # NFS does not lock directories
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor


def _path(store: str, region: str, afu: str, extension: str) -> str:
    return f"{store}/{requested_id(region, 'region')}/{requested_id(afu, 'AFU')}{extension}"


def _make_directories(path: str) -> None:
    if os.path.isdir(path):
        return
    _make_directories(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, 0o755)  # noqa: S103 - whatever the umask: all may read


def _copy(source: int, path: str, *, force: bool) -> None:
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}.new"
    with lock(directory) as parent:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # of a killed process
        try:
            _write(source, temporary)
            if force:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename it fails if the path exists
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        os.fsync(parent)


def _write(source: int, path: str) -> None:
    with closing(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)) as descriptor:
        done = 0
        while data := os.pread(source, _COPIED_AT_ONCE, done):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            done += len(data)
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
