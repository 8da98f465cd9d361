"""Paths of a node below a root: where links lead, and the directories on the way.

Below a root other than `/`, links are followed inside that root, absolute ones included, as after chroot(2). An
absolute link to the root's own real path leads to the same place as one without that prefix. Another process may
replace a directory of the tree by a link at any time, so every component is opened relative to the directory above it,
without following links (openat(2), O_NOFOLLOW): nothing outside the root is reached.
"""

import errno
import os
import re
from collections.abc import Callable
from typing import Self, TypeVar

from accelplane.host.errors import Unreadable

T = TypeVar("T")

MAX_OPEN_DIRECTORIES = 64
OPEN_LINKED_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
SPECIAL_NAMES = ("", ".", "..")  # of the directory itself, and of the one above it
_OPEN_DIRECTORY = OPEN_LINKED_DIRECTORY | os.O_NOFOLLOW
_MAX_LINKS = 40  # as the kernel's own limit (path_resolution(7))
_PROCESS_ROOT = re.compile(r"/proc/[0-9]+/root")
_ABSENT = ""  # in the place of a link's text, which is never empty


class Directory:
    """A directory's descriptor, closed with the last reference: a thread may use it while another drops the cache."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class HostPaths:
    """The paths below `root`. What links lead to is cached until `forget`; `close_directories` closes the directories.

    `directories_read` are the directories of the paths that were looked up, without links.
    """

    def __init__(self, root: str | os.PathLike[str], max_directories: int) -> None:
        """At most `max_directories` directories stay open."""
        # realpath(3) of this link, which leads into another mount namespace, would be the root of this one.
        self.root = f"{root}/." if _PROCESS_ROOT.fullmatch(os.fspath(root)) else os.path.realpath(root)
        self.prefix = "" if self.root == "/" else self.root
        self._max_directories = min(MAX_OPEN_DIRECTORIES, max_directories)
        self._begin()

    def fresh(self) -> Self:
        """Others below the same root, with an empty cache. Does not resolve the root again."""
        made = object.__new__(type(self))
        made.root, made.prefix, made._max_directories = self.root, self.prefix, self._max_directories
        made._begin()
        return made

    def _begin(self) -> None:
        self.directories_read: set[str] = set()
        self._links: dict[str, str | None] = {}
        self._canonical: dict[str, str] = {}
        self._directories: dict[str, Directory] = {}

    def resolve(self, path: str) -> str:
        """The absolute path without links. What does not exist stays as written. Raises `Unreadable` if links loop."""
        directory, _, name = path.rpartition("/")
        return self._follow(self.canonical_directory(directory), name, path) or "/"

    def place(self, path: str) -> tuple[str, Directory | None]:
        """The name of `path` in the open directory that contains it; the complete path and None below `/`.

        Raises `OSError`, `ValueError` or `Unreadable`.
        """
        directory, _, name = path.rpartition("/")
        if not self.prefix:
            self.directories_read.add(directory or "/")
            return path, None
        if name in SPECIAL_NAMES:
            directory, _, name = self.resolve(path).rpartition("/")
        canonical = self.canonical_directory(directory)
        self.directories_read.add(canonical or "/")
        return name or ".", self.directory(canonical)

    def canonical_directory(self, directory: str) -> str:
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

    def call_at(self, call: Callable[..., T], canonical: str, *arguments: int) -> T:
        """Calls a function of `os` with `dir_fd` for a path without links. Raises the exceptions of the function."""
        above, _, name = canonical.rpartition("/")
        directory = self.directory(above)
        return call(name or ".", *arguments, dir_fd=directory.descriptor)

    def directory(self, canonical: str) -> Directory:
        """The directory at a path without links, opened component by component. Raises `OSError` or `ValueError`."""
        found = self._directories.get(canonical)
        if found is not None:
            return found
        names: list[str] = []
        while (found := self._directories.get(canonical)) is None and canonical:
            canonical, _, name = canonical.rpartition("/")
            names.append(name)
        if found is None:
            found = self._directories[""] = Directory(os.open(self.root, _OPEN_DIRECTORY))
        while names:
            name = names.pop()
            found = Directory(os.open(name, _OPEN_DIRECTORY, dir_fd=found.descriptor))
            canonical = f"{canonical}/{name}"
            if len(self._directories) >= self._max_directories:
                self._directories.clear()
            self._directories[canonical] = found
        return found

    def close_directories(self) -> None:
        """Closes all directories. What links lead to stays known. Another thread may be reading."""
        self._directories.clear()

    def forget(self) -> None:
        """Clears what links lead to. Open directories stay open."""
        self._links.clear()
        self._canonical.clear()

    def _link(self, path: str) -> str | None:
        """The text of the link at a path whose directory has no links; None if it is no link, `_ABSENT` if nothing."""
        if path in self._links:
            return self._links[path]
        above, _, name = path.rpartition("/")
        try:
            if self.prefix:
                directory = self.directory(above)
                target = os.readlink(name, dir_fd=directory.descriptor)
            else:
                target = os.readlink(path)
        except (OSError, ValueError) as error:
            target = None if isinstance(error, OSError) and error.errno == errno.EINVAL else _ABSENT
        else:
            self.directories_read.add(above or "/")
        self._links[path] = target
        return target

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
                if self.prefix and f"{target}/".startswith(f"{self.prefix}/"):
                    target = target[len(self.prefix) :]  # as `ln -s $TREE/sys/devices/x` makes it
            pending.extend(reversed(target.split("/")))
        return done
