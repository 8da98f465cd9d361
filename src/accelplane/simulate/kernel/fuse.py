"""A kernel's files at a mount point, served on /dev/fuse by a thread of this process (docs/decisions/0010).

As in sysfs, every read calls the kernel, every write is passed in one piece and returns the kernel's errno, entries
cannot be created or removed, and open files of removed entries fail with ENODEV.

The thread needs the interpreter lock while callers are in system calls. System calls of Python release it, except
between fork and exec: do not use the mount as the working directory of `subprocess`.
"""

import ctypes
import errno
import os
import select
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from accelplane.simulate.kernel import wire
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.model import Attribute, Directory, Entry, Link, link_text, oserror
from accelplane.simulate.kernel.wire import Op, Request

_DEVICE = "/dev/fuse"
_NOSUID, _NODEV, _BIND, _REC, _DETACH = 2, 4, 4096, 16384, 2
_ROOT = 1
_READ_ONLY_ERRNOS = {
    **dict.fromkeys((Op.MKNOD, Op.CREATE), errno.EACCES),
    **dict.fromkeys((Op.MKDIR, Op.SYMLINK, Op.LINK, Op.UNLINK, Op.RMDIR, Op.RENAME, Op.RENAME2), errno.EPERM),
}


class FuseUnavailable(Exception):
    """No file system can be mounted; the message has the reason."""


class _Inode(msgspec.Struct, eq=False):
    """An entry that the host kernel refers to by its inode, with its path."""

    entry: Entry
    path: str
    lookups: int = 0


class _Open(msgspec.Struct, eq=False):
    """An open file or directory with its state of reading."""

    entries: list[tuple[str, int, int]]
    content: bytes = b""


class FileSystem:
    """Handles FUSE requests of the host kernel for `kernel`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._inodes: dict[int, _Inode] = {_ROOT: _Inode(kernel.tree.root, "")}
        self._open: dict[int, _Open] = {}
        self._handles = 0
        self._waiting: list[Request] = []
        self._answers: dict[int, Callable[[Request, _Inode], bytes]] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.SETATTR: self._getattr,
            Op.READLINK: lambda _request, inode: os.fsencode(_text(inode)),
            Op.OPEN: self._open_file,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._open_directory,
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: self._release,
            Op.STATFS: lambda _request, _inodes: wire.file_system(),
            Op.ACCESS: lambda _request, _inodes: b"",
        }

    def answer(self, data: bytes) -> bytes | None:
        """Returns the reply to a request, None for requests without one and for those that wait."""
        request = wire.parse(data)
        if request.op == Op.INTERRUPT:
            return self._interrupt(wire.HANDLE.unpack_from(request.body)[0])
        if request.op in (Op.FORGET, Op.BATCH_FORGET, Op.DESTROY):
            self._forget(request)
            return None
        if request.op == Op.INIT:
            return wire.answer(request.unique, wire.init(request.body))
        if self._blocks(request):
            self._waiting.append(request)
            return None
        return self._reply(request)

    def late_answers(self) -> Iterator[bytes]:
        """Yields the replies to requests that waited and are no longer blocked."""
        ready = [request for request in self._waiting if not self._blocks(request)]
        self._waiting = [request for request in self._waiting if request not in ready]
        yield from map(self._reply, ready)

    def _blocks(self, request: Request) -> bool:
        if request.op not in (Op.READ, Op.WRITE) or request.node not in self._inodes:
            return False
        with self._kernel.lock:
            return self._kernel.blocks(self._inodes[request.node].path)

    def _interrupt(self, unique: int) -> bytes | None:
        """The reply to a request that waits and whose caller has got a signal."""
        waiting = [request for request in self._waiting if request.unique != unique]
        interrupted, self._waiting = len(waiting) < len(self._waiting), waiting
        return wire.answer(unique, error=errno.EINTR) if interrupted else None

    def _reply(self, request: Request) -> bytes:
        try:
            return wire.answer(request.unique, self._answer(request))
        except OSError as error:
            return wire.answer(request.unique, error=error.errno or errno.EIO)

    def _answer(self, request: Request) -> bytes:
        if request.op in _READ_ONLY_ERRNOS:
            raise oserror(_READ_ONLY_ERRNOS[Op(request.op)])
        handler = self._answers.get(request.op)
        inode = self._inodes.get(request.node)
        if handler is None:
            # Also FLUSH: after ENOSYS the kernel stops sending it when files are closed. A child of this process
            # closes files between fork and exec, while no thread can reply.
            raise oserror(errno.ENOSYS)
        if inode is None:
            raise oserror(errno.ESTALE)
        with self._kernel.lock:
            return handler(request, inode)

    def _forget(self, request: Request) -> None:
        forgotten: list[tuple[int, int]] = []
        if request.op == Op.FORGET:
            forgotten = [(request.node, wire.HANDLE.unpack_from(request.body)[0])]
        elif request.op == Op.BATCH_FORGET:
            count = wire.COUNT.unpack_from(request.body)[0]
            forgotten = [wire.FORGOTTEN.unpack_from(request.body, 8 + 16 * place) for place in range(count)]
        for node, lookups in forgotten:
            inode = self._inodes.get(node)
            if inode is None or node == _ROOT:
                continue
            inode.lookups -= lookups
            if inode.lookups <= 0:
                del self._inodes[node]

    def _lookup(self, request: Request, inode: _Inode) -> bytes:
        name = os.fsdecode(request.body.rstrip(b"\0"))
        if not isinstance(inode.entry, Directory):
            raise oserror(errno.ENOTDIR)
        entry = inode.entry.entries.get(name)
        if entry is None:
            raise oserror(errno.ENOENT)
        child = self._inodes.setdefault(entry.inode, _Inode(entry, f"{inode.path}/{name}"))
        child.lookups += 1
        return wire.lookup_reply(entry, _text(child))

    def _getattr(self, _request: Request, inode: _Inode) -> bytes:
        return wire.attributes_reply(inode.entry, _text(inode))

    def _open_file(self, request: Request, inode: _Inode) -> bytes:
        entry = inode.entry
        if not isinstance(entry, Attribute):
            raise oserror(errno.EISDIR)
        access = wire.OPEN_FLAGS.unpack_from(request.body)[0] & os.O_ACCMODE
        # Sysfs rejects unsupported access modes also for root.
        if access != os.O_RDONLY and entry.write is None:
            raise oserror(errno.EACCES)
        if access != os.O_WRONLY and not entry.mode & 0o444:
            raise oserror(errno.EACCES)
        return wire.open_reply(self._handle([]), wire.DIRECT_IO)

    def _read(self, request: Request, inode: _Inode) -> bytes:
        handle, offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        reader = self._open[handle]
        if offset == 0:
            reader.content = self._kernel.read_attribute(inode.path, self._present(inode))
        return reader.content[offset : offset + size]

    def _write(self, request: Request, inode: _Inode) -> bytes:
        _handle, _offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        data = request.body[wire.WRITE_SIZE : wire.WRITE_SIZE + size]
        attribute = self._present(inode)
        if inode.path.startswith("/sys/"):
            data = data[: wire.PAGE]
        self._kernel.write_attribute(inode.path, attribute, data.decode(errors="surrogateescape"))
        return wire.write_reply(len(data))

    def _present(self, inode: _Inode) -> Attribute:
        try:
            present = self._kernel.tree.entry(inode.path)
        except OSError:
            present = None
        if present is not inode.entry or not isinstance(present, Attribute):
            raise oserror(errno.ENODEV)
        return present

    def _open_directory(self, _request: Request, inode: _Inode) -> bytes:
        if not isinstance(inode.entry, Directory):
            raise oserror(errno.ENOTDIR)
        present = {".": inode.entry, "..": inode.entry, **inode.entry.entries}
        return wire.open_reply(self._handle([(name, entry.inode, wire.kind(entry)) for name, entry in present.items()]))

    def _readdir(self, request: Request, _inodes: _Inode) -> bytes:
        handle, offset, size = wire.HANDLE_OFFSET_SIZE.unpack_from(request.body)
        return wire.directory_entries(self._open[handle].entries, offset, size)

    def _release(self, request: Request, _inodes: _Inode) -> bytes:
        self._open.pop(wire.HANDLE.unpack_from(request.body)[0], None)
        return b""

    def _handle(self, entries: list[tuple[str, int, int]]) -> int:
        self._handles += 1
        self._open[self._handles] = _Open(entries)
        return self._handles


@contextmanager
def serve_fuse(kernel: Kernel, where: str) -> Generator[None, None, None]:
    """Mounts the kernel's complete tree (`sys`, `dev`) at the directory `where` and serves it.

    Raises `FuseUnavailable`.
    """
    with ExitStack() as undo:
        try:
            device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FuseUnavailable(f"{_DEVICE}: {error.strerror}") from None
        undo.callback(os.close, device)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
        try:
            mount("accelplane", where, "fuse.accelplane", _NOSUID | _NODEV, options)
        except OSError as error:
            hint = "; mounting needs root (CAP_SYS_ADMIN)" if error.errno == errno.EPERM else ""
            raise FuseUnavailable(f"{where}: cannot mount: {error.strerror}{hint}") from None
        undo.callback(unmount, where)
        undo.enter_context(_serve_in_thread(FileSystem(kernel), device))
        _end_flushing(kernel, where)
        yield


@contextmanager
def bind_mount(source: str, target: str) -> Generator[None, None, None]:
    """Bind mounts the directory `source` at `target`. Raises `OSError`."""
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
    """umount2(2) with MNT_DETACH. A missing mount is ignored. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(target), _DETACH) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


@contextmanager
def _serve_in_thread(files: FileSystem, device: int) -> Generator[None, None, None]:
    """Serves the device in a thread. Raises the first exception of the thread at the end."""
    failures: list[Exception] = []
    stopped = os.eventfd(0, os.EFD_CLOEXEC)
    thread = threading.Thread(target=_serve, args=(files, device, stopped, failures), name="fuse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(stopped, 1)
        thread.join()
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
        for each in (*([] if reply is None else [reply]), *files.late_answers()):
            try:
                os.write(device, each)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # the caller has exited
                    failures.append(error)


def _end_flushing(kernel: Kernel, where: str) -> None:
    """Closes a file once, so that the host kernel learns that FLUSH is not supported."""
    for path, entry in kernel.tree.walk():
        if isinstance(entry, Attribute) and entry.mode & 0o444:
            os.close(os.open(where + path, os.O_RDONLY | os.O_CLOEXEC))
            return


def _text(inode: _Inode) -> str:
    return link_text(inode.path, inode.entry.target) if isinstance(inode.entry, Link) else ""
