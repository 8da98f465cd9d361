"""The file tree of a kernel in memory: directories, attributes, links and device nodes.

Paths are absolute (`/sys/…`, `/dev/…`). Links are stored as absolute paths and written as relative ones, as in the
kernel. This module is independent of devices.
"""

import errno
import itertools
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from accelplane.simulate.journal import Numbers

_MAX_LINKS = 40
_new_inode = itertools.count(2).__next__


class Attribute:
    """A small file. Its content is fixed, or returned by `read`; `write` gets the text that was written, unchanged.

    Truth values are shown as 0 and 1. A newline is appended to the content, as in almost every attribute, except with
    `raw`. Both functions may raise `OSError`.
    """

    __slots__ = ("inode", "mode", "raw", "read", "text", "write")

    def __init__(
        self,
        text: str | int = "",
        *,
        read: Callable[[], object] | None = None,
        write: Callable[[str], None] | None = None,
        mode: int | None = None,
        raw: bool = False,
    ) -> None:
        self.inode = _new_inode()
        self.text = str(text)
        self.read = read
        self.write = write
        self.mode = (0o644 if write else 0o444) if mode is None else mode
        self.raw = raw

    def content(self) -> bytes:
        """The content for readers. Raises `OSError`."""
        value = self.text if self.read is None else self.read()
        content = str(int(value) if isinstance(value, bool) else value).encode(errors="surrogateescape")
        return content if self.raw else content + b"\n"


def command(write: Callable[[str], None]) -> Attribute:
    """An attribute that is only written, such as `bind`."""
    return Attribute(write=write, mode=0o200)


def variable(
    owner: object,
    field: str,
    parse: Callable[[str], Any] = str,
    *,
    check: Callable[[], None] = lambda: None,
    convert: Callable[[Any], object] = lambda value: value,
    show: Callable[[Any], object] = lambda value: value,
) -> Attribute:
    """An attribute that shows a field of `owner` and sets it.

    A write calls `parse` with the text, then `check`, then `convert` with the parsed value: the order in which the
    driver finds errors. Each of them may raise `OSError`.
    """

    def write(text: str) -> None:
        value = parse(text)
        check()
        setattr(owner, field, convert(value))

    return Attribute(read=lambda: show(getattr(owner, field)), write=write)


def stored_value(value: str | int, parse: Callable[[str], object] = str, *, raw: bool = False) -> Attribute:
    """An attribute whose content is replaced by the parsed text of a write."""
    attribute = Attribute(value, raw=raw, mode=0o644)

    def write(text: str) -> None:
        attribute.text = str(parse(text))

    attribute.write = write
    return attribute


class Link(msgspec.Struct, eq=False):
    target: str
    inode: int = msgspec.field(default_factory=_new_inode)


class DeviceNode(msgspec.Struct, eq=False):
    """A character device under `/dev`."""

    numbers: Numbers
    inode: int = msgspec.field(default_factory=_new_inode)


class Directory(msgspec.Struct, eq=False):
    """Named entries in the order of their creation."""

    entries: "dict[str, Entry]" = {}
    inode: int = msgspec.field(default_factory=_new_inode)


Entry = Attribute | Link | DeviceNode | Directory


class Tree:
    """The tree from `/`. Missing paths raise `FileNotFoundError`, as the kernel's calls do.

    `watchers` are called with each entry that is added to a path, and with None for each that is removed.
    """

    def __init__(self) -> None:
        self.root = Directory()
        self.watchers: list[Callable[[str, Entry | None], None]] = []

    def directory(self, path: str, attributes: Mapping[str, Attribute | str | int] | None = None) -> None:
        """Creates the directory with its parents, or adds to an existing one."""
        self._ensure_directory(path)
        for name, attribute in (attributes or {}).items():
            entry = attribute if isinstance(attribute, Attribute) else Attribute(attribute)
            self.put(f"{path}/{name}", entry)

    def link(self, path: str, target: str) -> None:
        self.put(path, Link(target))

    def put(self, path: str, entry: Entry) -> None:
        """Adds an entry, with the directories above it. Raises `FileExistsError`."""
        parent, name = posixpath.split(path)
        directory = self._ensure_directory(parent)
        if name in directory.entries:
            raise oserror(errno.EEXIST, path)
        directory.entries[name] = entry
        for watcher in self.watchers:
            watcher(path, entry)

    def remove(self, path: str) -> None:
        """Removes an entry with everything in it. A missing entry is ignored."""
        parent, name = posixpath.split(path)
        try:
            directory = self.entry(parent)
        except FileNotFoundError:
            return
        if isinstance(directory, Directory) and directory.entries.pop(name, None):
            for watcher in self.watchers:
                watcher(path, None)

    def prune(self, path: str) -> None:
        """Removes an empty directory and its empty parents, up to `/dev` or `/sys`."""
        while path.count("/") > 1 and isinstance(entry := self._entry_at(path), Directory) and not entry.entries:
            self.remove(path)
            path = posixpath.dirname(path)

    def resolve(self, path: str) -> str:
        """The path without links; the last part need not exist. Raises `OSError` for loops and dangling links."""
        return self._walk_links(path)[0]

    def lookup(self, path: str) -> tuple[str, Entry]:
        """The path without links, and its entry. Raises `OSError`."""
        canonical, entry = self._walk_links(path)
        if entry is None:
            raise oserror(errno.ENOENT, canonical)
        return canonical, entry

    def entry(self, path: str) -> Entry:
        """The entry at the path. Follows links in the parents, but not the last part. Raises `OSError`."""
        parent, name = posixpath.split(path)
        if not name:
            return self.root
        directory = self._walk_links(parent)[1]
        entry = directory.entries.get(name) if isinstance(directory, Directory) else None
        if entry is None:
            raise oserror(errno.ENOENT, path)
        return entry

    def attribute(self, path: str) -> Attribute:
        """The attribute at the path; follows links. Raises `OSError`."""
        return self.resolved_attribute(path)[1]

    def resolved_attribute(self, path: str) -> tuple[str, Attribute]:
        """The path without links, and its attribute. Raises `OSError`."""
        canonical, entry = self.lookup(path)
        if isinstance(entry, Attribute):
            return canonical, entry
        raise oserror(errno.EISDIR if isinstance(entry, Directory) else errno.EINVAL, path)

    def has(self, path: str) -> bool:
        """Whether the path exists; follows links."""
        try:
            return self._walk_links(path)[1] is not None
        except OSError:
            return False

    def glob(self, pattern: str) -> list[str]:
        """The resolved paths that match a pattern with `*`, `?` and `[…]`."""
        found = [""]
        for part in filter(None, pattern.split("/")):
            if any(character in part for character in "*?["):
                parents = [(base, self._entry_at(base)) for base in found]
                found = [
                    f"{base}/{name}"
                    for base, parent in parents
                    if isinstance(parent, Directory)
                    for name in parent.entries
                    if fnmatchcase(name, part)
                ]
            else:
                found = [f"{base}/{part}" for base in found]
            found = [resolved for path in found if (resolved := self._existing(path))]
        return found

    def names(self, path: str) -> list[str]:
        """The sorted names in a directory; follows links. Raises `OSError`."""
        entry = self.lookup(path)[1]
        if not isinstance(entry, Directory):
            raise oserror(errno.ENOTDIR, path)
        return sorted(entry.entries)

    def walk(self, path: str = "") -> Iterator[tuple[str, Entry]]:
        """All entries below the path, directories before their content."""
        top = self._entry_at(path)
        if not isinstance(top, Directory):
            return
        for name, entry in list(top.entries.items()):
            yield f"{path}/{name}", entry
            if isinstance(entry, Directory):
                yield from self.walk(f"{path}/{name}")

    def _ensure_directory(self, path: str) -> Directory:
        directory = self.root
        for part in filter(None, path.split("/")):
            entry = directory.entries.setdefault(part, Directory())
            if not isinstance(entry, Directory):
                raise oserror(errno.ENOTDIR, path)
            directory = entry
        return directory

    def _walk_links(self, path: str) -> tuple[str, Entry | None]:
        """The path without links, and its entry, which may be missing. Raises `OSError`.

        Each part is looked up once, in the directory of the part before it: provisioning reads thousands of paths.
        """
        pending = path.split("/")[::-1]
        names: list[str] = []
        entries: list[Entry | None] = [self.root]
        hops = 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if names:
                    names.pop()
                    entries.pop()
                continue
            parent = entries[-1]
            entry = parent.entries.get(part) if isinstance(parent, Directory) else None
            if isinstance(entry, Link):
                hops += 1
                if hops > _MAX_LINKS:
                    raise oserror(errno.ELOOP, path)
                names.clear()
                del entries[1:]
                pending.extend(reversed(entry.target.split("/")))
                continue
            if entry is None and pending:
                raise oserror(errno.ENOENT, path)
            names.append(part)
            entries.append(entry)
        return f"/{'/'.join(names)}", entries[-1]

    def _existing(self, path: str) -> str:
        """The path without links; empty if it does not exist."""
        try:
            return self.lookup(path)[0]
        except OSError:
            return ""

    def _entry_at(self, path: str) -> Entry | None:
        entry: Entry | None = self.root
        for part in filter(None, path.split("/")):
            if not isinstance(entry, Directory):
                return None
            entry = entry.entries.get(part)
        return entry


def link_text(path: str, target: str) -> str:
    """The result of readlink(2) for a link at `path` to `target`."""
    return posixpath.relpath(target, posixpath.dirname(path))


def oserror(number: int, path: str = "") -> OSError:
    """The exception for that errno."""
    return OSError(number, os.strerror(number), path or None)
