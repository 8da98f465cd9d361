"""The bitstream store of a node: `/srv/intel.com/fpga/<interface id>/<unique id>.gbs` or `.aocx`.

Ids of a look-up come from a container's environment, so they are ids and nothing else before a path is made of them,
and a link that leads out of the store is not followed. Links within, put there for people, do no harm. A file is
installed under a name of its own and then renamed: whoever looks sees all of it or none.
"""

import contextlib
import os
from collections.abc import Generator

from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import EXTENSIONS, Bitstream, opened
from accelplane.fpga.ids import IdError, wanted_id
from accelplane.host import Host

STORE = "/srv/intel.com/fpga"

_COPIED_AT_ONCE = 1024 * 1024


class StoreError(FpgaError):
    """The store cannot be read or written."""


class NotInStore(StoreError):
    """There is no bitstream for that region and AFU."""


class AlreadyInStore(StoreError):
    """The file is there, and was not to be overwritten."""


def install_path(bitstream: Bitstream, store: str = STORE) -> str:
    """Where the bitstream belongs, empty when its ids don't say."""
    try:
        return _path(store, bitstream.interface, bitstream.unique, bitstream.extension)
    except IdError:
        return ""


def find(host: Host, region: str, afu: str, store: str = STORE) -> str:
    """The path of the bitstream that makes `afu` of the region; GBS before AOCX.

    Raises `IdError`, `NotInStore`, or `StoreError`.
    """
    for extension in EXTENSIONS:
        path = _path(store, region, afu, extension)
        try:
            os.stat(host.local(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from None
        home, found = host.resolve(store), host.resolve(path)
        if not found.startswith(f"{home}/"):
            raise StoreError(f"{path}: leads to {found}, out of the store; expected the file itself or a link within")
        return path
    tried = " nor ".join(_path(store, region, afu, extension) for extension in EXTENSIONS)
    raise NotInStore(f"no bitstream for AFU {afu} in region {region}: neither {tried} is there (fpga_tool install)")


@contextlib.contextmanager
def opened_for(host: Host, region: str, afu: str, store: str = STORE) -> Generator[Bitstream]:
    """The bitstream that `find` finds, open. Raises as `find`, and `BitstreamError`."""
    path = find(host, region, afu, store)
    with opened(host.local(path), path) as bitstream:
        yield bitstream


def install(host: Host, bitstream: Bitstream, store: str = STORE, *, force: bool = False, dry_run: bool = False) -> str:
    """Copies the file to its place, which is returned; what is there already is overwritten only with `force`.

    Raises `AlreadyInStore`, `StoreError`, `BitstreamError` (what is packed in it is damaged).
    """
    path = install_path(bitstream, store)
    if not path:
        raise StoreError(
            f"{bitstream.path}: cannot be installed, its interface id is {bitstream.interface!a} and its unique id "
            f"{bitstream.unique!a}; expected 8 to 40 hexadecimal digits each"
        )
    bitstream.size()  # unpacks it to its end
    try:
        directory, _, name = path.rpartition("/")
        local = f"{host.local(directory)}/{name}"  # the place itself, whatever a link there leads to
        if not force and os.path.lexists(local):
            raise _there(path)
        if not dry_run:
            _make_directories(os.path.dirname(local))
            _copy(bitstream.descriptor, local, force=force)
    except FileExistsError:
        raise _there(path) from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be installed: {error.strerror}") from None
    return path


@contextlib.contextmanager
def alone(directory: str) -> Generator[int]:
    """The directory, open, with nobody else who installs something there."""
    import fcntl  # noqa: PLC0415 - for those who install

    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS does not lock directories
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _there(path: str) -> AlreadyInStore:
    return AlreadyInStore(f"{path}: is there already; -force overwrites it")


def _path(store: str, region: str, afu: str, extension: str) -> str:
    return f"{store}/{wanted_id(region, 'region')}/{wanted_id(afu, 'AFU')}{extension}"


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
    with alone(directory) as parent:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # of one that was killed
        try:
            _write(source, temporary)
            if force:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename, never over what came there meanwhile
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        os.fsync(parent)


def _write(source: int, path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while data := os.pread(source, _COPIED_AT_ONCE, done):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            done += len(data)
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
