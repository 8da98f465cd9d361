"""The files of a node below a root: read, listed, written.

A `HostFiles` is made for one scan. It caches what links lead to, and records the directories that it read
(`directories_read`, without links in their paths), which the agent then watches. A write drops the cache, because the
kernel moves links.

Below a root other than `/`, links are followed inside that root, absolute ones included, as after chroot(2). An absolute
link to the root's own real path leads to the same place as one without that prefix. A device node may be a plain file or
a directory there, because trees without hardware have no others.
"""

import errno
import fnmatch
import itertools
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from accelplane.host.errors import HostError, Missing, Unreadable, WriteError, host_error

# sysfs never gives more than a page for a text attribute; binary ones are not read here.
ATTRIBUTE_LIMIT = 64 * 1024
DIRECTORY_LIMIT = 65_536
_MAX_LINKS = 40  # as the kernel's own limit (path_resolution(7))


class SysfsDevice(NamedTuple):
    """An entry of a directory below `/sys/class` or `/sys/bus`."""

    name: str
    path: str


class HostFiles:
    """The node below `root`. Every path given or returned is the host's own, without the root."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.path.realpath(root)
        self.directories_read: set[str] = set()
        self.notes: list[str] = []
        self._prefix = "" if self.root == "/" else self.root
        self._links: dict[str, str | None] = {}
        self._ways: dict[str, str] = {}

    def local(self, path: str) -> str:
        """Where the host's `path` is found by this process, links resolved inside the root.

        Raises `Unreadable` when links loop.
        """
        return path if not self._prefix else self._prefix + self.resolve(path)

    def resolve(self, path: str) -> str:
        """The canonical form of `path`: absolute, without links. What does not exist stays as written.

        Raises `Unreadable` when links loop.
        """
        directory, _, name = path.rpartition("/")
        return self._walked(self._way(directory), name, path) or "/"

    def text(self, path: str) -> str:
        """The file's text without surrounding white space.

        Raises `Missing` or `Unreadable` (also for what is not text, is no regular file or is endless).
        """
        return self.raw_text(path).strip()

    def raw_text(self, path: str) -> str:
        """The file's text as it is. Raises as `text` does."""
        directory, _, name = path.rpartition("/")
        directory = self._directory(directory)
        self.directories_read.add(directory)
        try:
            data = self._read(f"{directory}/{name}")
        except (OSError, ValueError) as error:
            raise host_error(path, error) from None
        if len(data) > ATTRIBUTE_LIMIT:
            raise Unreadable(path, f"more than {ATTRIBUTE_LIMIT} bytes, expected a short text")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise Unreadable(path, f"not text: {data[:16].hex(' ')}…") from None

    def write(self, path: str, text: str) -> None:
        """Writes `text` as it is into the file, in one piece as attributes want it.

        Raises `Missing`, or `WriteError` with the kernel's reason. In a tree of plain files a missing one is made.
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
            self.forget()
        if written != len(data):
            raise WriteError(path, f"only {written} of {len(data)} bytes taken (writing {text[:80]!a})")

    def names(self, path: str) -> list[str]:
        """The directory's entries in byte-wise order. Raises `Missing` or `Unreadable`."""
        directory = self._directory(path)
        self.directories_read.add(directory)
        try:
            with os.scandir(self._prefix + directory) as entries:
                found: list[str] = []
                for entry in entries:
                    found.append(entry.name)
                    if len(found) > DIRECTORY_LIMIT:
                        raise Unreadable(path, f"more than {DIRECTORY_LIMIT} entries")
        except (OSError, ValueError) as error:
            raise host_error(path, error) from None
        # As text and as bytes only names that are no UTF-8 sort differently.
        found.sort(key=None if "".join(found).isascii() else os.fsencode)
        return found

    def exists(self, path: str) -> bool:
        """Whether `path` leads to something, links followed."""
        return self.status(path) is not None

    def status(self, path: str) -> os.stat_result | None:
        """What stat(2) says of `path`, links followed; None where it leads to nothing."""
        directory, _, name = path.rpartition("/")
        try:
            directory = self._directory(directory)
            self.directories_read.add(directory)
            if not self._prefix or name in ("", ".", ".."):
                return os.stat(self.local(path))
            found = os.lstat(f"{self._prefix}{directory}/{name}")
            return os.stat(self.local(path)) if stat.S_ISLNK(found.st_mode) else found
        except (OSError, HostError, ValueError):
            return None

    def link(self, path: str) -> str:
        """The text of the symbolic link `path`, as stored. Raises `Missing` or `Unreadable` (not a link)."""
        directory, _, name = path.rpartition("/")
        directory = self._directory(directory)
        self.directories_read.add(directory)
        try:
            return os.readlink(f"{self._prefix}{directory}/{name}")
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
        """The entries of `/sys/class/<subsystem>` (or `/sys/bus/<subsystem>/devices`), none when it is not there.

        Raises `Unreadable`.
        """
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

    def forget(self) -> None:
        """Drops what is cached: a write moves links, and with them what they lead to."""
        self._links.clear()
        self._ways.clear()

    def _link(self, path: str) -> str | None:
        if path in self._links:
            return self._links[path]
        try:
            target = os.readlink(self._prefix + path)
        except (OSError, ValueError):
            target = None
        else:
            self.directories_read.add(path.rpartition("/")[0] or "/")
        self._links[path] = target
        return target

    def _directory(self, path: str) -> str:
        return (self._way(path) if self._prefix else path) or "/"

    def _way(self, directory: str) -> str:
        """The canonical form of a directory, empty for the root. Raises `Unreadable`."""
        known = self._ways.get(directory)
        if known is None:
            above, _, name = directory.rpartition("/")
            if above in self._ways:
                known = self._walked(self._ways[above], name, directory)
            else:
                known = self._walked("", directory, directory)
            self._ways[directory] = known
        return known

    def _walked(self, done: str, rest: str, path: str) -> str:
        """Where `rest` of `path` leads from `done`, which is canonical. Raises `Unreadable` when links loop."""
        pending = rest.split("/")[::-1]
        hops = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            candidate = f"{done}/{part}"
            target = self._link(candidate)
            if target is None:
                done = candidate
                continue
            hops += 1
            if hops > _MAX_LINKS:
                raise Unreadable(path, f"more than {_MAX_LINKS} symbolic links, do they loop?")
            if target.startswith("/"):
                done = ""
                if self._prefix and f"{target}/".startswith(f"{self._prefix}/"):
                    target = target[len(self._prefix) :]  # as `ln -s $TREE/sys/devices/x` makes it
            pending.extend(reversed(target.split("/")))
        return done

    def _read(self, path: str) -> bytes:
        # O_NONBLOCK: a FIFO in a hostile tree must not hold the scan. O_NOFOLLOW: a link may lead out of the root.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        if self._prefix:
            flags |= os.O_NOFOLLOW
        try:
            descriptor = os.open(self._prefix + path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP or not self._prefix:
                raise
            descriptor = os.open(self._prefix + self.resolve(path), flags)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
                raise OSError(code, os.strerror(code) if stat.S_ISDIR(mode) else "not a regular file")
            # A seq_file returns at most a page per read, whatever is asked for.
            data = piece = os.read(descriptor, ATTRIBUTE_LIMIT + 1)
            while piece and len(data) <= ATTRIBUTE_LIMIT:
                piece = os.read(descriptor, ATTRIBUTE_LIMIT + 1 - len(data))
                data += piece
            return data
        finally:
            os.close(descriptor)

    def _open_to_write(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        local = self.local(path)
        try:
            return os.open(local, flags)
        except FileNotFoundError:
            if not self._prefix:
                raise
            try:
                return os.open(local, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError:
                pass
            raise

    def _glob(self, base: str, parts: list[str]) -> Iterator[str]:
        plain = list(itertools.takewhile(lambda part: not any(character in part for character in "*?["), parts))
        base = "/".join((base, *plain))
        if len(plain) == len(parts):
            if self.exists(base or "/"):
                yield base or "/"
            return
        part, rest = parts[len(plain)], parts[len(plain) + 1 :]
        try:
            names = self.names(base or "/")
        except HostError:
            return
        for name in fnmatch.filter(names, part):
            if part.startswith(".") or not name.startswith("."):
                if rest:
                    yield from self._glob(f"{base}/{name}", rest)
                elif self.exists(f"{base}/{name}"):
                    yield f"{base}/{name}"
