"""The manifests below directories: their edits, and the references that no edit changes."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from accelplane.manifests.edits import Change, Settings, edit, new_reference, references_in, selected_images
from accelplane.manifests.spans import MAX_TEXT, EditError

_YAML = {".yaml", ".yml"}
MAX_FILES = 20_000


class FileEdit(msgspec.Struct, frozen=True):
    """The edit of a file that changes."""

    path: Path
    text: str
    changes: tuple[Change, ...]


class Remaining(msgspec.Struct, frozen=True):
    """A reference that the new values do not agree with, at a place that is no field of a manifest."""

    path: Path
    line: int
    reference: str
    expected: str


def manifests(paths: Sequence[Path]) -> Iterator[Path]:
    """The YAML files among the paths and below the directories among them, without templates of Helm charts.

    Raises `EditError` for a path that does not exist.
    """
    count = 0
    for path in paths:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise EditError(f"{path}: not found; expected a file or a directory")
        for directory, names, files in os.walk(path):
            names[:] = sorted(name for name in names if not _skipped(Path(directory), name))
            for name in sorted(files):
                if Path(name).suffix in _YAML:
                    count += 1
                    if count > MAX_FILES:
                        raise EditError(f"{path}: found more than {MAX_FILES} files; name smaller directories")
                    _check_file(file := Path(directory, name), path)
                    yield file


def edits(paths: Sequence[Path], settings: Settings) -> tuple[list[FileEdit], list[Remaining]]:
    """The edits of all manifests, and the remaining references. Raises `EditError` with the name of the file."""
    changed: list[FileEdit] = []
    remaining: list[Remaining] = []
    for path in manifests(paths):
        text = read(path)
        try:
            edited = edit(text, settings, chart=path.name == "Chart.yaml")
            remaining += left_behind(path, edited.text, settings)
        except EditError as error:
            raise EditError(f"{path}: {error}") from error
        if edited.changes:
            changed.append(FileEdit(path, edited.text, edited.changes))
    return changed, remaining


def left_behind(path: Path, text: str, settings: Settings) -> Iterator[Remaining]:
    """The references of selected images in a text that have another registry, version or digest."""
    for number, line in enumerate(text.split("\n"), 1):
        for found in references_in(line, settings):
            expected = new_reference(found[0], settings)
            if expected != found[0]:
                yield Remaining(path, number, found[0], expected)


def images(paths: Sequence[Path], settings: Settings) -> Iterator[tuple[Path, int, str]]:
    """The selected images of all manifests, with file and line."""
    for path in manifests(paths):
        try:
            for line, reference in selected_images(read(path), settings):
                yield path, line, reference
        except EditError as error:
            raise EditError(f"{path}: {error}") from error


def read(path: Path) -> str:
    """The text of a file with its line ends. Raises `EditError` if it is too long or not UTF-8."""
    with path.open("rb") as stream:
        content = stream.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise EditError(f"{path}: found more than {MAX_TEXT} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise EditError(f"{path}: found bytes that are not UTF-8 at position {error.start}") from error


def write(path: Path, text: str) -> None:
    """Replaces a file by a rename. Mode and symbolic links stay."""
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text.encode())
        os.chmod(temporary, path.stat().st_mode & 0o7777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _check_file(file: Path, root: Path) -> None:
    """Raises `EditError` for a link out of the directory, which the user has not named, and for special files."""
    if not file.is_file():
        raise EditError(f"{file}: found no regular file; remove it, or name other files")
    if file.is_symlink() and not file.resolve().is_relative_to(root.resolve()):
        raise EditError(f"{file}: found a link to {file.resolve()}, which is not below {root}; name that file too")


def _skipped(directory: Path, name: str) -> bool:
    return name.startswith(".") or (name == "templates" and (directory / "Chart.yaml").exists())
