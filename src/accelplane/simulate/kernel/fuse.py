"""A kernel's files at a mount point, served on /dev/fuse by a thread of this process (docs/decisions/0010).

What processes see is what sysfs would do: every read asks the kernel, every write is one piece and gets the kernel's
errno, nothing can be made or removed, and what was removed answers ENODEV to those who have it open still.

The thread needs the interpreter while callers are in system calls. Those of Python let go of it, except between fork
and exec: nothing may touch the mount then, so don't give it to `subprocess` as the working directory.
"""

import ctypes
import errno
import os
import select
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from accelplane.simulate.kernel import wire
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, Directory, Entry, Link, link_text, oserror
from accelplane.simulate.kernel.wire import Op, Request

_DEVICE = "/dev/fuse"
_NOSUID, _NODEV, _BIND, _REC, _DETACH = 2, 4, 4096, 16384, 2
_ROOT = 1
_MADE_BY_NOBODY = {
    Op.MKDIR: errno.EPERM,
    Op.MKNOD: errno.EACCES,
    Op.CREATE: errno.EACCES,
    Op.SYMLINK: errno.EPERM,
    Op.LINK: errno.EPERM,
    Op.UNLINK: errno.EPERM,
    Op.RMDIR: errno.EPERM,
    Op.RENAME: errno.EPERM,
    Op.RENAME2: errno.EPERM,
}


class FuseUnavailable(Exception):
    """No file system can be mounted here; the message says why."""


class _Known:
    """An entry that the machine's kernel knows by its inode, and where it is."""

    __slots__ = ("entry", "lookups", "path")

    def __init__(self, entry: Entry, path: str) -> None:
        self.entry = entry
        self.path = path
        self.lookups = 0


class _Open:
    """An open file or directory, with what its reader is in the middle of."""

    __slots__ = ("content", "entries")

    def __init__(self, entries: list[tuple[str, int, int]]) -> None:
        self.content = b""
        self.entries = entries


class FileSystem:
    """Answers the machine's kernel about `kernel`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._known: dict[int, _Known] = {_ROOT: _Known(kernel.tree.root, "")}
        self._open: dict[int, _Open] = {}
        self._handles = 0
        self._answers: dict[int, Callable[[Request, _Known], bytes]] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.SETATTR: self._getattr,
            Op.READLINK: self._readlink,
            Op.OPEN: self._open_file,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._open_directory,
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: self._release,
            Op.STATFS: lambda _request, _known: wire.file_system(),
            Op.ACCESS: lambda _request, _known: b"",
        }

    def answer(self, data: bytes) -> bytes | None:
        """What to write back to the request, None for those that want nothing."""
        request = wire.parse(data)
        if request.op in (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT, Op.DESTROY):
            self._forget(request)
            return None
        if request.op == Op.INIT:
            return wire.answer(request.unique, wire.init(request.body))
        try:
            return wire.answer(request.unique, self._answer(request))
        except OSError as error:
            return wire.answer(request.unique, error=error.errno or errno.EIO)

    def _answer(self, request: Request) -> bytes:
        if request.op in _MADE_BY_NOBODY:
            raise oserror(_MADE_BY_NOBODY[Op(request.op)])
        handler = self._answers.get(request.op)
        known = self._known.get(request.node)
        if handler is None:
            # FLUSH too: after ENOSYS, the kernel sends no more of them when files are closed, which a child of
            # this process does before it executes, while no thread can answer.
            raise oserror(errno.ENOSYS)
        if known is None:
            raise oserror(errno.ESTALE)
        with self._kernel.lock:
            return handler(request, known)

    def _forget(self, request: Request) -> None:
        forgotten: list[tuple[int, int]] = []
        if request.op == Op.FORGET:
            forgotten = [(request.node, wire.HANDLE.unpack_from(request.body)[0])]
        elif request.op == Op.BATCH_FORGET:
            count = wire.COUNT.unpack_from(request.body)[0]
            forgotten = [wire.FORGOTTEN.unpack_from(request.body, 8 + 16 * place) for place in range(count)]
        for node, lookups in forgotten:
            known = self._known.get(node)
            if known is None or node == _ROOT:
                continue
            known.lookups -= lookups
            if known.lookups <= 0:
                del self._known[node]

    def _lookup(self, request: Request, known: _Known) -> bytes:
        name = os.fsdecode(request.body.rstrip(b"\0"))
        if not isinstance(known.entry, Directory):
            raise oserror(errno.ENOTDIR)
        entry = known.entry.entries.get(name)
        if entry is None:
            raise oserror(errno.ENOENT)
        child = self._known.setdefault(entry.inode, _Known(entry, f"{known.path}/{name}"))
        child.lookups += 1
        return wire.found(entry, _text(child))

    def _getattr(self, _request: Request, known: _Known) -> bytes:
        return wire.attributes_reply(known.entry, _text(known))

    def _readlink(self, _request: Request, known: _Known) -> bytes:
        return os.fsencode(_text(known))

    def _open_file(self, request: Request, known: _Known) -> bytes:
        entry = known.entry
        if not isinstance(entry, Attribute):
            raise oserror(errno.EISDIR)
        access = wire.OPEN_FLAGS.unpack_from(request.body)[0] & os.O_ACCMODE
        # Root may open anything; sysfs refuses all the same what the attribute was not made for.
        if access != os.O_RDONLY and entry.write is None:
            raise oserror(errno.EACCES)
        if access != os.O_WRONLY and not entry.mode & 0o444:
            raise oserror(errno.EACCES)
        return wire.opened(self._handle([]), wire.DIRECT_IO)

    def _read(self, request: Request, known: _Known) -> bytes:
        handle, offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        reader = self._open[handle]
        if offset == 0:
            reader.content = self._kernel.read_attribute(known.path, self._present(known))
        return reader.content[offset : offset + size]

    def _write(self, request: Request, known: _Known) -> bytes:
        _handle, _offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        data = request.body[wire.WRITE_SIZE : wire.WRITE_SIZE + size]
        attribute = self._present(known)
        if known.path.startswith("/sys/"):
            data = data[: wire.PAGE]
        self._kernel.write_attribute(known.path, attribute, data.decode(errors="surrogateescape"))
        return wire.written(len(data))

    def _present(self, known: _Known) -> Attribute:
        try:
            there = self._kernel.tree.entry(known.path)
        except OSError:
            there = None
        if there is not known.entry or not isinstance(there, Attribute):
            raise oserror(errno.ENODEV)
        return there

    def _open_directory(self, _request: Request, known: _Known) -> bytes:
        if not isinstance(known.entry, Directory):
            raise oserror(errno.ENOTDIR)
        here = [(".", known.entry.inode, stat.S_IFDIR >> 12), ("..", known.entry.inode, stat.S_IFDIR >> 12)]
        entries = [(name, entry.inode, wire.kind(entry)) for name, entry in known.entry.entries.items()]
        return wire.opened(self._handle(here + entries))

    def _readdir(self, request: Request, _known: _Known) -> bytes:
        handle, offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        return wire.directory_entries(self._open[handle].entries, offset, size)

    def _release(self, request: Request, _known: _Known) -> bytes:
        self._open.pop(wire.HANDLE.unpack_from(request.body)[0], None)
        return b""

    def _handle(self, entries: list[tuple[str, int, int]]) -> int:
        self._handles += 1
        self._open[self._handles] = _Open(entries)
        return self._handles


@contextmanager
def served(kernel: Kernel, where: str) -> Generator[None, None, None]:
    """Mounts the kernel's whole tree (`sys`, `dev`) at the directory `where` and serves it until left.

    Raises `FuseUnavailable`.
    """
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FuseUnavailable(f"{_DEVICE}: {error.strerror}") from None
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
        try:
            mount("accelplane", where, "fuse.accelplane", _NOSUID | _NODEV, options)
        except OSError as error:
            hint = "; mounting needs root (CAP_SYS_ADMIN)" if error.errno == errno.EPERM else ""
            raise FuseUnavailable(f"{where}: cannot mount: {error.strerror}{hint}") from None
        try:
            with _serving(FileSystem(kernel), device):
                _end_flushing(kernel, where)
                yield
        finally:
            unmount(where)
    finally:
        os.close(device)


@contextmanager
def bound(source: str, target: str) -> Generator[None, None, None]:
    """Shows the directory `source` at `target` until left. Raises `OSError`."""
    mount(source, target, "", _BIND | _REC, "")
    try:
        yield
    finally:
        unmount(target)


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2). Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if libc.mount(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def unmount(target: str) -> None:
    """umount2(2), at once, also while the mount is in use or if there is none. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(target), _DETACH) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


@contextmanager
def _serving(files: FileSystem, device: int) -> Generator[None, None, None]:
    """Answers on the device, in a thread, until left; what went wrong in that thread is raised then."""
    failures: list[Exception] = []
    stopped, stop = os.pipe2(os.O_CLOEXEC)
    thread = threading.Thread(target=_serve, args=(files, device, stopped, failures), name="fuse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(stop, b"\0")
        thread.join()
        os.close(stop)
        os.close(stopped)
    if failures:
        raise failures[0]


def _serve(files: FileSystem, device: int, stopped: int, failures: list[Exception]) -> None:
    poll = select.poll()
    poll.register(device, select.POLLIN)
    poll.register(stopped, select.POLLIN)
    while not any(descriptor == stopped for descriptor, _events in poll.poll()):
        try:
            data = os.read(device, wire.REQUEST_SIZE)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # interrupted, or the request was withdrawn
                continue
            if error.errno != errno.ENODEV:  # unmounted by another process
                failures.append(error)
            return
        try:
            reply = files.answer(data)
        except Exception as error:  # noqa: BLE001 - the caller must not hang; raised where the mount ends
            failures.append(error)
            reply = wire.answer(wire.parse(data).unique, error=errno.EIO)
        if reply is not None:
            try:
                os.write(device, reply)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # the one who asked is gone
                    failures.append(error)


def _end_flushing(kernel: Kernel, where: str) -> None:
    """Closes a file once, so that the machine's kernel learns that FLUSH requests are not supported."""
    for path, entry in kernel.tree.walk():
        if isinstance(entry, Attribute) and entry.mode & 0o444:
            os.close(os.open(where + path, os.O_RDONLY | os.O_CLOEXEC))
            return


def _text(known: _Known) -> str:
    return link_text(known.path, known.entry.target) if isinstance(known.entry, Link) else ""
