"""The files of a node below a root: read, listed, written.

A `HostFiles` is made for one scan. It caches what links lead to, and records the directories that it read
(`directories_read`, without links in their paths), which the agent then watches. A write drops the cache, because the
kernel moves links.

Below a root other than `/`, links are followed inside that root, and nothing outside it is read or written (`paths`). A
device node may be a plain file or a directory there, because trees without hardware have no others.
"""

import contextlib
import errno
import fnmatch
import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, Self

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError, host_error
from accelplane.host.operations import NOTHING_BLOCKED, Blocked, BlockedError, Operation, blocked_device
from accelplane.host.paths import MAX_OPEN_DIRECTORIES, OPEN_LINKED_DIRECTORY, SPECIAL_NAMES, Directory, HostPaths
from accelplane.host.pci import pci_address

# sysfs never gives more than a page for a text attribute; binary ones are not read here.
ATTRIBUTE_LIMIT = 64 * 1024
DIRECTORY_LIMIT = 65_536
_OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_OPEN_AGAIN = _OPEN_TO_READ | os.O_NOFOLLOW
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LIST_AGAIN = _LIST | os.O_NOFOLLOW
_PIECE = ATTRIBUTE_LIMIT + 1  # a sysctl allocates the requested size of a read
_MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a component of a path may be another file than before


class SysfsDevice(NamedTuple):
    """An entry of a directory below `/sys/class` or `/sys/bus`."""

    name: str
    path: str


class HostFiles:
    """The node below `root`. Every path given or returned is the host's own, without the root."""

    def __init__(self, root: str | os.PathLike[str] = "/", *, open_directories: int = MAX_OPEN_DIRECTORIES) -> None:
        """`read_once` keeps the directories of its files open, at most `open_directories`."""
        self._max_directories = open_directories
        # Devices of which an operation has not returned. Their files are not read, and lists omit them.
        self.blocked: Mapping[str, Blocked] = NOTHING_BLOCKED
        self._begin(HostPaths(root, open_directories))

    def fresh(self) -> Self:
        """Another one below the same root, with an empty cache. Does not resolve the root again."""
        made = object.__new__(type(self))
        made._max_directories = self._max_directories
        made.blocked = self.blocked
        made._begin(self._paths.fresh())
        return made

    def _begin(self, paths: HostPaths) -> None:
        self._paths = paths
        self.operation = Operation()
        # The blocked devices of which files were requested.
        self.missed: set[str] = set()
        # Whether the scan ended at a file of a blocked device.
        self.interrupted = False
        self.root, self._prefix, self.directories_read = paths.root, paths.prefix, paths.directories_read
        self.notes: list[str] = []
        # The directories of files that `read_once` has read, by their paths with links, and that of the last file.
        self._file_directories: dict[str, Directory] = {}
        self._recent: tuple[str, Directory] | None = None

    def local(self, path: str) -> str:
        """The path of the host's `path` for this process, links resolved inside the root.

        Raises `Unreadable` if links loop. If others may write to the tree, `open` is safe where this is not.
        """
        return path if not self._prefix else self._prefix + self.resolve(path)

    def resolve(self, path: str) -> str:
        """The absolute path without links. What does not exist stays as written. Raises `Unreadable` if links loop."""
        return self._paths.resolve(path)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of the file, which may be a device node. FIFOs without a peer do not block.

        Raises `OSError` (with `O_NOFOLLOW` also for a link), `ValueError` for a path with a zero byte, or `Unreadable`
        if links loop.
        """
        follow = not flags & os.O_NOFOLLOW
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        self._check_blocked(path)
        name, directory = self._paths.place(path)
        with self.operation.of(path):
            if directory is None:
                return os.open(name, flags, mode)
            flags |= os.O_NOFOLLOW
            try:
                return os.open(name, flags, mode, dir_fd=directory.descriptor)
            except OSError as error:
                if error.errno != errno.ELOOP or not follow:
                    raise
            return self._paths.call_at(os.open, self.resolve(path), flags, mode)

    def read_bytes(self, path: str, limit: int = ATTRIBUTE_LIMIT) -> bytes:
        """The file's content. Raises `Missing` or `Unreadable` (no regular file, more than `limit` bytes)."""
        try:
            descriptor = self.open(path, os.O_RDONLY)
            try:
                with self.operation.of(path):
                    return _read(path, descriptor, limit)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise host_error(path, error) from None

    def read_once(self, path: str, size: int) -> bytes:
        """At most `size` bytes of the file, with one read(2). Raises `Missing` or `Unreadable`.

        For repeated reads of known paths: directories stay open, and links are followed again only after a path has led
        nowhere.
        """
        try:
            descriptor = self._open_again(path)
            try:
                with self.operation.of(path):
                    return os.read(descriptor, size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise host_error(path, error) from None

    def raw_text(self, path: str) -> str:
        """The file's text as it is. Raises as `text` does."""
        data = self.read_bytes(path)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise Unreadable(path, f"not text: {data[:16].hex(' ')}…") from None

    def text(self, path: str) -> str:
        """The file's text without surrounding white space. Raises `Missing`, or `Unreadable` also if it is no text."""
        return self.raw_text(path).strip()

    def text_or_empty(self, path: str) -> str:
        """As `text`, but empty if the file cannot be read."""
        try:
            return self.text(path)
        except HostError:
            return ""

    def optional_text(self, path: str) -> str | None:
        """As `text`, but None if the file does not exist. Raises `Unreadable`."""
        try:
            return self.text(path)
        except Missing:
            return None

    def write(self, path: str, text: str) -> None:
        """Writes `text` unchanged into the file, with one write(2) as attributes require.

        Raises `Missing`, or `WriteError` with the kernel's reason. Below a root other than `/`, a missing file is made.
        """
        data = text.encode()
        # The files of a driver, such as bind, take the address of a device.
        subject = f"{path}/{text}" if pci_address(text) else path
        try:
            self._check_blocked(subject)
            descriptor = self._open_to_write(path)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                with self.operation.of(subject):
                    written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except FileNotFoundError as error:
            raise host_error(path, error) from None
        except (OSError, ValueError, HostError) as error:
            problem = error if isinstance(error, HostError) else host_error(path, error)
            raise WriteError(path, f"{problem.problem} (writing {text[:80]!a})", problem.errno) from None
        finally:
            self._forget()
        if written != len(data):
            raise WriteError(path, f"only {written} of {len(data)} bytes written (writing {text[:80]!a})")

    def names(self, path: str) -> list[str]:
        """The directory's entries in byte-wise order, without blocked devices. Raises `Missing` or `Unreadable`."""
        found = self._list(path)
        if self.blocked:
            devices = {name: self.blocked_device(f"{path}/{name}") for name in found}
            found = [name for name in found if not devices[name]]
            self.missed.update(filter(None, devices.values()))
        return found

    def _list(self, path: str) -> list[str]:
        """Raises `Missing` or `Unreadable`."""
        try:
            if not self._prefix:
                self.directories_read.add(path or "/")
                self._check_blocked(path)
                with self.operation.of(path):
                    return _names(path, path or "/")
            canonical = self._paths.canonical_directory(path)
            self.directories_read.add(canonical or "/")
            self._check_blocked(path)
            with self.operation.of(path):
                descriptor = self._paths.call_at(os.open, f"{canonical}/", _LIST)
                try:
                    return _names(path, descriptor)
                finally:
                    os.close(descriptor)
        except (OSError, ValueError) as error:
            raise host_error(path, error) from None

    def names_again(self, path: str) -> list[str]:
        """As `names`, for repeated reads of the same directories. Does not add them to `directories_read`.

        Raises `Missing` or `Unreadable`.
        """
        try:
            place = self._paths.canonical_directory(path) if self._prefix else path
            above, _, name = place.rpartition("/")
            flags = _LIST_AGAIN if self._prefix else _LIST
            descriptor = os.open(name or ".", flags, dir_fd=self._file_directory(above).descriptor)
            try:
                return _names(path, descriptor)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or error.errno not in _MOVED:
                raise host_error(path, error) from None
        found = self.fresh().names(path)
        self._forget()
        return found

    def entries(self, path: str) -> list[str]:
        """As `names`, but empty if the directory cannot be listed."""
        try:
            return self.names(path)
        except HostError:
            return []

    def exists(self, path: str) -> bool:
        """Whether `path` leads to something, links followed."""
        return self.status(path) is not None

    def status(self, path: str) -> os.stat_result | None:
        """The result of stat(2), links followed; None if `path` leads to nothing."""
        try:
            name, directory = self._paths.place(path)
            with self.operation.of(path):
                if directory is None:
                    return os.stat(name)
                found = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    found = self._paths.call_at(partial(os.stat, follow_symlinks=False), self.resolve(path))
            return None if stat.S_ISLNK(found.st_mode) else found
        except (OSError, HostError, ValueError):
            return None

    def link(self, path: str) -> str:
        """The text of the symbolic link `path`, as stored. Raises `Missing` or `Unreadable` (not a link)."""
        try:
            name, directory = self._paths.place(path)
            return os.readlink(name, dir_fd=None if directory is None else directory.descriptor)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EINVAL:
                raise Unreadable(path, "not a symbolic link") from None
            raise host_error(path, error) from None

    def glob(self, pattern: str) -> Iterator[str]:
        """Existing paths that match `pattern`, component by component, in byte-wise order, links followed.

        `*`, `?` and `[…]` never match a slash nor a leading dot. Directories that cannot be listed match nothing.
        """
        yield from self._glob("", [part for part in pattern.split("/") if part])

    def class_devices(self, subsystem: str, *, bus: bool = False) -> list[SysfsDevice]:
        """The entries of `/sys/class/<subsystem>`, or of `/sys/bus/<subsystem>/devices`. Raises `Unreadable`."""
        directory = f"/sys/bus/{subsystem}/devices" if bus else f"/sys/class/{subsystem}"
        try:
            return [SysfsDevice(name, f"{directory}/{name}") for name in self.names(directory)]
        except Missing:
            return []

    def is_plain_stand_in(self, status: os.stat_result) -> bool:
        """Whether a plain file or a directory stands for a device node: only below a root other than `/`."""
        return bool(self._prefix) and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))

    def note(self, text: str) -> None:
        """Remembers something odd for the log; the agent prints it once, not at every scan."""
        self.notes.append(text)

    def close_directories(self) -> None:
        """Closes all directories. What links lead to stays known. Another thread may be reading."""
        self._paths.close_directories()
        self._file_directories.clear()
        self._recent = None

    def device_of_node(self, path: str) -> str:
        """The sysfs directory of the device behind a file in `/dev`. Raises `HostError`."""
        return self.resolve(path)

    def blocked_device(self, path: str) -> str:
        """The blocked device that the path leads to, empty if there is none."""
        try:
            found = self.device_of_node(path) if path.startswith("/dev/") else self.resolve(path)
        except HostError:
            return ""
        return blocked_device(found, self.blocked)

    def _check_blocked(self, path: str) -> None:
        """Raises `BlockedError`."""
        if self.blocked and (device := self.blocked_device(path)):
            self.missed.add(device)
            raise BlockedError(path, f"not accessed, because an operation on another file of {device} has not returned")

    def _forget(self) -> None:
        """Clears the cache: a write can change links and thereby paths."""
        self._paths.forget()
        self.close_directories()

    def _file_directory(self, directory: str) -> Directory:
        """The directory that a path leads to, which stays open. Raises `OSError`, `ValueError` or `Unreadable`."""
        found = self._file_directories.get(directory)
        if found is None:
            if self._prefix:
                found = self._paths.directory(self._paths.canonical_directory(directory))
            else:
                found = Directory(os.open(directory or "/", OPEN_LINKED_DIRECTORY))
            if len(self._file_directories) >= self._max_directories:
                self._file_directories.clear()
            self._file_directories[directory] = found
        return found

    def _open_again(self, path: str) -> int:
        """As `open` to read, with what is known of the file's directory."""
        directory, _, name = path.rpartition("/")
        try:
            recent = self._recent
            if recent is None or recent[0] != directory:
                if name in SPECIAL_NAMES:
                    return self.open(path, os.O_RDONLY)
                recent = self._recent = directory, self._file_directory(directory)
            return os.open(name, _OPEN_AGAIN if self._prefix else _OPEN_TO_READ, dir_fd=recent[1].descriptor)
        except OSError as error:
            if error.errno not in _MOVED:
                raise
        # Without the cache. If the file does not exist there either, the cache is valid for the other files.
        descriptor = self.fresh().open(path, os.O_RDONLY)
        self._forget()
        return descriptor

    def _open_to_write(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_TRUNC
        if not self._prefix:
            return self.open(path, flags)
        path = self.resolve(path)
        try:
            return self.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                return self.open(path, flags | os.O_CREAT | os.O_EXCL)
            raise

    def _glob(self, base: str, parts: list[str]) -> Iterator[str]:
        plain = list(itertools.takewhile(lambda part: not any(character in part for character in "*?["), parts))
        base = "/".join((base, *plain))
        if len(plain) == len(parts):
            if self.exists(base or "/"):
                yield base or "/"
            return
        part, rest = parts[len(plain)], parts[len(plain) + 1 :]
        for name in fnmatch.filter(self.entries(base or "/"), part):
            if part.startswith(".") or not name.startswith("."):
                if rest:
                    yield from self._glob(f"{base}/{name}", rest)
                elif self.exists(f"{base}/{name}"):
                    yield f"{base}/{name}"


def _read(path: str, descriptor: int, limit: int) -> bytes:
    """Raises `OSError` or `Unreadable`."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "not a regular file")
    # A seq_file returns at most a page per read, whatever the requested size.
    data = piece = os.read(descriptor, min(_PIECE, limit + 1))
    while piece and len(data) != status.st_size and len(data) <= limit:
        piece = os.read(descriptor, min(_PIECE, limit + 1 - len(data)))
        data += piece
    if len(data) > limit:
        raise Unreadable(path, f"more than {limit} bytes, expected a shorter file")
    return data


def _names(path: str, directory: str | int) -> list[str]:
    """Raises `OSError` or `Unreadable`."""
    with os.scandir(directory) as entries:
        found: list[str] = []
        for entry in entries:
            found.append(entry.name)
            if len(found) > DIRECTORY_LIMIT:
                raise Unreadable(path, f"more than {DIRECTORY_LIMIT} entries")
    # As text and as bytes only names that are no UTF-8 sort differently.
    found.sort(key=None if "".join(found).isascii() else os.fsencode)
    return found
