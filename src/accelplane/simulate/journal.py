"""A journal of created files that can remove them in reverse order.

A device is created in the order of the kernel and udev: its directory first, the links to it last. A concurrent scan
therefore never finds an incomplete device. The journal removes it in reverse order.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Generator, Mapping
from typing import Literal, NamedTuple

Nodes = Literal["files", "char"]


class TreeError(Exception):
    """The tree cannot be changed. The message names the file or device."""


class Numbers(NamedTuple):
    """Device numbers, as in `/sys/…/dev`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}:{self.minor}"


class Journal:
    """The files of one device. Paths do not contain the root of the tree."""

    def __init__(self, root: str, device_nodes: Nodes, numbers: tuple[int, int] | None) -> None:
        self._root = root
        self._device_nodes = device_nodes
        self._numbers = numbers
        self._made: list[str] = []
        self._shared: list[str] = []

    def directory(self, path: str, files: Mapping[str, str]) -> None:
        """Creates a directory with attributes. Each attribute ends with a newline. Raises `TreeError`."""
        local = self._root + path
        with _tree_error(path):
            os.makedirs(os.path.dirname(local), exist_ok=True)
            os.mkdir(local)
            self._made.append(local)
            for name, text in files.items():
                attribute = f"{local}/{name}"
                os.makedirs(os.path.dirname(attribute), exist_ok=True)
                with open(attribute, "x", encoding="utf-8") as file:
                    file.write(text + "\n")

    def link(self, path: str, target: str) -> None:
        """Creates a relative link at `path` to `target`. Raises `TreeError`."""
        self.link_as(path, os.path.relpath(target, os.path.dirname(path)))

    def link_as(self, path: str, text: str) -> None:
        """Creates a link with this text. Raises `TreeError`."""
        with self._creating(path) as local:
            os.symlink(text, local)

    def node(self, path: str, numbers: Numbers) -> None:
        """Creates a device node, or a plain file that represents one. Raises `TreeError`."""
        with self._creating(path) as local:
            try:
                if self._device_nodes == "char":
                    os.mknod(local, stat.S_IFCHR | 0o660, os.makedev(*(self._numbers or numbers)))
                else:
                    os.close(os.open(local, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o660))
            except PermissionError as error:
                hint = "" if self._device_nodes == "files" else "; device nodes need CAP_MKNOD, use plain files instead"
                raise TreeError(f"{path}: {error.strerror}{hint}") from None

    def keep(self, path: str, text: str) -> None:
        """Creates a file that `undo` does not remove, such as a file of a driver module. Raises `TreeError`."""
        local = self._root + path
        with _tree_error(path):
            os.makedirs(os.path.dirname(local), exist_ok=True)
            if not os.path.exists(local):
                with open(local, "w", encoding="utf-8") as file:
                    file.write(text + "\n")

    def undo(self) -> None:
        """Removes all files in reverse order. Ignores missing files. Raises `TreeError`."""
        try:
            while self._made:
                _remove(self._made[-1])
                self._made.pop()
        except OSError as error:
            raise TreeError(f"{error.filename}: {error.strerror}") from None
        # devtmpfs and udev remove their directories when they are empty.
        while self._shared:
            with contextlib.suppress(OSError):
                os.rmdir(self._shared.pop())

    @contextlib.contextmanager
    def _creating(self, path: str) -> Generator[str]:
        """Yields the path in the tree, whose parents exist then, and records it."""
        local = self._root + path
        parent = os.path.dirname(local)
        if path.startswith("/dev/") and path.count("/") > 2:
            self._shared.append(parent)
        with _tree_error(path):
            os.makedirs(parent, exist_ok=True)
            yield local
            self._made.append(local)


def _remove(local: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(local).st_mode):
            shutil.rmtree(local)
        else:
            os.unlink(local)


@contextlib.contextmanager
def _tree_error(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = "already exists" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise TreeError(f"{path}: {reason}") from None
