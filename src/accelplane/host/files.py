"""The files of a node below a root: read, listed, written.

A `HostFiles` is made for one scan. It caches what links lead to, and records the directories that it read
(`directories_read`, without links in their paths), which the agent then watches. A write drops the cache, because the
kernel moves links.

Below a root other than `/`, links are followed inside that root, absolute ones included, as after chroot(2). An
absolute link to the root's own real path leads to the same place as one without that prefix. A device node may be a
plain file or a directory there, because trees without hardware have no others. Another process may replace a directory
of the tree by a link at any time, so every component is opened relative to the directory above it, without following
links (openat(2), O_NOFOLLOW): nothing outside the root is read or written.
"""

import contextlib
import errno
import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Self, TypeVar

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError, host_error

T = TypeVar("T")

# sysfs never gives more than a page for a text attribute; binary ones are not read here.
ATTRIBUTE_LIMIT = 64 * 1024
DIRECTORY_LIMIT = 65_536
_MAX_LINKS = 40  # as the kernel's own limit (path_resolution(7))
_MAX_OPEN_DIRECTORIES = 64
_OPEN_LINKED_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_DIRECTORY = _OPEN_LINKED_DIRECTORY | os.O_NOFOLLOW
_OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_OPEN_AGAIN = _OPEN_TO_READ | os.O_NOFOLLOW
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LIST_AGAIN = _LIST | os.O_NOFOLLOW
_NO_NAMES = ("", ".", "..")
_PIECE = ATTRIBUTE_LIMIT + 1  # a sysctl allocates the requested size of a read
_PROCESS_ROOT = re.compile(r"/proc/[0-9]+/root")
_MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a component of a path may be another file than before
_ABSENT = ""  # in the place of a link's text, which is never empty


class SysfsDevice(NamedTuple):
    """An entry of a directory below `/sys/class` or `/sys/bus`."""

    name: str
    path: str


class _Directory:
    """A directory's descriptor, closed with the last reference: a thread may use it while another drops the cache."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class HostFiles:
    """The node below `root`. Every path given or returned is the host's own, without the root."""

    def __init__(self, root: str | os.PathLike[str] = "/", *, open_directories: int = _MAX_OPEN_DIRECTORIES) -> None:
        """`read_once` keeps the directories of its files open, at most `open_directories`."""
        # realpath(3) of this link, which leads into another mount namespace, would be the root of this one.
        self.root = f"{root}/." if _PROCESS_ROOT.fullmatch(os.fspath(root)) else os.path.realpath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._max_directories = open_directories
        self._begin()

    def fresh(self) -> Self:
        """Another one below the same root, which knows nothing yet. Does not resolve the root again."""
        made = object.__new__(type(self))
        made.root, made._prefix, made._max_directories = self.root, self._prefix, self._max_directories
        made._begin()
        return made

    def _begin(self) -> None:
        self.directories_read: set[str] = set()
        self.notes: list[str] = []
        self._links: dict[str, str | None] = {}
        self._canonical: dict[str, str] = {}
        self._directories: dict[str, _Directory] = {}
        # The directories of files that `read_once` has read, by their paths with links, and that of the last file.
        self._file_directories: dict[str, _Directory] = {}
        self._recent: tuple[str, _Directory] | None = None

    def local(self, path: str) -> str:
        """The path of the host's `path` for this process, links resolved inside the root.

        Raises `Unreadable` if links loop. If others may write to the tree, `open` is safe where this is not.
        """
        return path if not self._prefix else self._prefix + self.resolve(path)

    def resolve(self, path: str) -> str:
        """The absolute path without links. What does not exist stays as written. Raises `Unreadable` if links loop."""
        directory, _, name = path.rpartition("/")
        return self._follow(self._canonical_directory(directory), name, path) or "/"

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of the file, which may be a device node. FIFOs without a peer do not block.

        Raises `OSError` (with `O_NOFOLLOW` also for a link), `ValueError` for a path with a zero byte, or `Unreadable`
        if links loop.
        """
        follow = not flags & os.O_NOFOLLOW
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        name, directory = self._place(path)
        if directory is None:
            return os.open(name, flags, mode)
        flags |= os.O_NOFOLLOW
        try:
            return os.open(name, flags, mode, dir_fd=directory.descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP or not follow:
                raise
        return self._call_at(os.open, self.resolve(path), flags, mode)

    def read_bytes(self, path: str, limit: int = ATTRIBUTE_LIMIT) -> bytes:
        """The file's content. Raises `Missing` or `Unreadable` (no regular file, more than `limit` bytes)."""
        try:
            descriptor = self.open(path, os.O_RDONLY)
            try:
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
        try:
            descriptor = self._open_to_write(path)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
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
        """The directory's entries in byte-wise order. Raises `Missing` or `Unreadable`."""
        try:
            if not self._prefix:
                self.directories_read.add(path or "/")
                return _names(path, path or "/")
            canonical = self._canonical_directory(path)
            self.directories_read.add(canonical or "/")
            descriptor = self._call_at(os.open, f"{canonical}/", _LIST)
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
            place = self._canonical_directory(path) if self._prefix else path
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
            name, directory = self._place(path)
            if directory is None:
                return os.stat(name)
            found = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                found = self._call_at(partial(os.stat, follow_symlinks=False), self.resolve(path))
            return None if stat.S_ISLNK(found.st_mode) else found
        except (OSError, HostError, ValueError):
            return None

    def link(self, path: str) -> str:
        """The text of the symbolic link `path`, as stored. Raises `Missing` or `Unreadable` (not a link)."""
        try:
            name, directory = self._place(path)
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
        self._directories.clear()
        self._file_directories.clear()
        self._recent = None

    def _forget(self) -> None:
        """Clears the cache: a write can change links and thereby paths."""
        self._links.clear()
        self._canonical.clear()
        self.close_directories()

    def _place(self, path: str) -> tuple[str, _Directory | None]:
        """The name of `path` in the open directory that contains it; the complete path and None below `/`.

        Raises `OSError`, `ValueError` or `Unreadable`.
        """
        directory, _, name = path.rpartition("/")
        if not self._prefix:
            self.directories_read.add(directory or "/")
            return path, None
        if name in _NO_NAMES:
            directory, _, name = self.resolve(path).rpartition("/")
        canonical = self._canonical_directory(directory)
        self.directories_read.add(canonical or "/")
        return name or ".", self._directory(canonical)

    def _call_at(self, call: Callable[..., T], canonical: str, *arguments: int) -> T:
        """Calls a function of `os` with `dir_fd` for a path without links. Raises the exceptions of the function."""
        above, _, name = canonical.rpartition("/")
        directory = self._directory(above)
        return call(name or ".", *arguments, dir_fd=directory.descriptor)

    def _directory(self, canonical: str) -> _Directory:
        """The directory at a path without links, opened component by component. Raises `OSError` or `ValueError`."""
        found = self._directories.get(canonical)
        if found is not None:
            return found
        names: list[str] = []
        while (found := self._directories.get(canonical)) is None and canonical:
            canonical, _, name = canonical.rpartition("/")
            names.append(name)
        if found is None:
            found = self._directories[""] = _Directory(os.open(self.root, _OPEN_DIRECTORY))
        while names:
            name = names.pop()
            found = _Directory(os.open(name, _OPEN_DIRECTORY, dir_fd=found.descriptor))
            canonical = f"{canonical}/{name}"
            if len(self._directories) >= min(_MAX_OPEN_DIRECTORIES, self._max_directories):
                self._directories.clear()
            self._directories[canonical] = found
        return found

    def _file_directory(self, directory: str) -> _Directory:
        """The directory that a path leads to, which stays open. Raises `OSError`, `ValueError` or `Unreadable`."""
        found = self._file_directories.get(directory)
        if found is None:
            if self._prefix:
                found = self._directory(self._canonical_directory(directory))
            else:
                found = _Directory(os.open(directory or "/", _OPEN_LINKED_DIRECTORY))
            if len(self._file_directories) >= self._max_directories:
                self._file_directories.clear()
            self._file_directories[directory] = found
        return found

    def _link(self, path: str) -> str | None:
        """The text of the link at a path whose directory has no links; None if it is no link, `_ABSENT` if nothing."""
        if path in self._links:
            return self._links[path]
        above, _, name = path.rpartition("/")
        try:
            if self._prefix:
                directory = self._directory(above)
                target = os.readlink(name, dir_fd=directory.descriptor)
            else:
                target = os.readlink(path)
        except (OSError, ValueError) as error:
            target = None if isinstance(error, OSError) and error.errno == errno.EINVAL else _ABSENT
        else:
            self.directories_read.add(above or "/")
        self._links[path] = target
        return target

    def _canonical_directory(self, directory: str) -> str:
        """The path of a directory without links, empty for the root. Raises `Unreadable`."""
        known = self._canonical.get(directory)
        if known is None:
            above, _, name = directory.rpartition("/")
            if above in self._canonical:
                known = self._follow(self._canonical[above], name, directory)
            else:
                known = self._follow("", directory, directory)
            self._canonical[directory] = known
        return known

    def _follow(self, done: str, rest: str, path: str) -> str:
        """Where `rest` of `path` leads from `done`, which has no links. Raises `Unreadable` if links loop."""
        pending = rest.split("/")[::-1]
        hops = 0
        absent = ""
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            candidate = f"{done}/{part}"
            if absent and candidate.startswith(absent):
                done = candidate
                continue
            target = self._link(candidate)
            if not target:
                if target == _ABSENT:
                    absent = f"{candidate}/"
                done = candidate
                continue
            hops += 1
            if hops > _MAX_LINKS:
                raise Unreadable(path, f"more than {_MAX_LINKS} symbolic links; check for a loop")
            if target.startswith("/"):
                done = ""
                if self._prefix and f"{target}/".startswith(f"{self._prefix}/"):
                    target = target[len(self._prefix) :]  # as `ln -s $TREE/sys/devices/x` makes it
            pending.extend(reversed(target.split("/")))
        return done

    def _open_again(self, path: str) -> int:
        """As `open` to read, with what is known of the file's directory."""
        directory, _, name = path.rpartition("/")
        try:
            recent = self._recent
            if recent is None or recent[0] != directory:
                if name in _NO_NAMES:
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
