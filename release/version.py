"""`make version TO=1.2.0`: changes the version of the package, of the images in manifests and pages, and of the charts.

The version is written in `src/accelplane/__init__.py` only. References to images and versions of charts follow it.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from accelplane.manifests import files
from accelplane.manifests.edits import Settings, new_reference, references_in
from accelplane.manifests.spans import EditError
from release.errors import ReleaseError

SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-[0-9A-Za-z]+(?:[.-][0-9A-Za-z]+)*)?")
_ASSIGNMENT = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def current(root: Path) -> str:
    """The version of the source tree."""
    file = root / "src/accelplane/__init__.py"
    found = _ASSIGNMENT.search(file.read_text())
    if not found:
        raise ReleaseError(f'{file}: found no line __version__ = "…"')
    return found[1]


def check(version: str) -> None:
    """Raises `ReleaseError` for a version that is not valid for images, charts and Python packages."""
    if not SEMANTIC.fullmatch(version):
        raise ReleaseError(f"version: found {version!a}, expected a semantic version such as 1.2.0, without v")
    try:
        Version(version)
    except InvalidVersion as error:
        raise ReleaseError(
            f"version: found {version!a}, expected a release such as 1.2.0 or a candidate such as 1.2.0-rc.1"
        ) from error


def change(root: Path, version: str) -> Iterator[Path]:
    """Writes the version to all files that contain it, and yields these files. Nothing is written after an error."""
    check(version)
    init = root / "src/accelplane/__init__.py"
    old = current(root)
    settings = Settings(version=version)
    changed, remaining = files.edits([root / "deploy", root / "demo"], settings)
    if remaining:
        places = "\n".join(f"{each.path}:{each.line}: {each.reference}" for each in remaining)
        raise ReleaseError(f"found references that are no fields of manifests; edit them by hand:\n{places}")
    texts = {each.path: each.text for each in changed}
    for page in sorted(
        (*root.glob("*.md"), *root.joinpath("docs").rglob("*.md"), *root.joinpath("deploy").rglob("*.md"))
    ):
        if page.name == "CHANGELOG.md":
            continue
        text = page.read_text()
        if (edited := _page(text, old, settings)) != text:
            texts[page] = edited
    if old != version:
        texts[init] = _ASSIGNMENT.sub(f'__version__ = "{version}"', init.read_text())
    for path, text in texts.items():
        files.write(path, text)
        yield path


def _page(text: str, old: str, settings: Settings) -> str:
    """A page with the new version in references, and in the versions of kustomizations in its examples."""
    parts: list[str] = []
    position = 0
    for found in references_in(text, settings):
        parts += [text[position : found.start()], new_reference(found[0], settings)]
        position = found.end()
    edited = "".join([*parts, text[position:]])
    return re.sub(rf"(newTag: ){re.escape(old)}$", rf"\g<1>{settings.version}", edited, flags=re.MULTILINE)


def main(words: Sequence[str]) -> int:
    """The command: one version, or none to print the current one."""
    root = Path.cwd()
    try:
        if not words:
            print(current(root))
            return 0
        for path in change(root, words[0]):
            print(path.relative_to(root))
    except (ReleaseError, EditError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
