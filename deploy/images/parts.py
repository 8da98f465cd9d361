"""The parts of the images in the cache: each is made once for its sources, packages and recipe.

    python3 deploy/images/parts.py PART… [--architecture amd64|arm64]

Makes parts and prints their directories as a JSON object. The exit status is 3 if the mirror lacks a locked package.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buildroot import native
from debian import ARCHITECTURES, EXIT_PACKAGE_GONE, LOCK, Lock, PackageGoneError, RecipeError, default_cache, read_lock
from root import Recipe

REPOSITORY = Path(__file__).parents[2]

# What other parts a part goes over, in the order of the parameters of its function in root.py.
_OVER = {
    "base": (),
    "product": ("base",),
    "operator": ("base", "product"),
    "levelzero": ("base",),
    "shell": (),
    "fpga": (),
}
# Parts that depend on the sources of the product.
_OF_SOURCES = {"product", "operator", "fpga"}
_SOURCES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src")
_RECIPES = (
    *("buildroot.py", "contents.py", "debian.py", "elf.py", "fpga_freeze.py", "fpga_host.c", "fpga_host.py"),
    *("root.py", "wheels.py"),
)
# Of each part and architecture; several trees of sources use the same cache.
_KEPT = 4


class Parts:
    """Makes parts for any architecture, and remembers them in the cache."""

    def __init__(self, sources: Path, cache: Path, lock: Lock) -> None:
        self.sources = sources
        self.cache = cache
        self.lock = lock
        self.directory = cache / "parts"
        self._recipes: dict[str, Recipe] = {}
        pins = "".join(sorted(package.sha256 for package in lock.values()))
        self._tools = _digest(*(Path(__file__).with_name(name) for name in _RECIPES), salt=pins)
        self._product = _digest(*_files(sources), salt=self._tools)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process makes or deletes parts meanwhile."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for unfinished in self.directory.glob(".making-*"):
                shutil.rmtree(unfinished)
            yield

    def part(self, name: str, architecture: str) -> Path:
        """The directory of a part. It must not be changed."""
        digest = self._product if name in _OF_SOURCES else self._tools
        directory = self.directory / f"{name}-{architecture}-{digest}"
        if not directory.exists():
            others = [self.part(other, architecture) for other in _OVER[name]]
            with tempfile.TemporaryDirectory(dir=self.directory, prefix=".making-") as scratch:
                made = Path(scratch) / name
                getattr(self.recipe(architecture), name)(made, *others)
                made.rename(directory)
            self._delete_old(name, architecture)
        os.utime(directory)
        return directory

    def recipe(self, architecture: str) -> Recipe:
        """The recipe of an architecture."""
        if architecture not in self._recipes:
            self._recipes[architecture] = Recipe(architecture, self.sources, self.cache, self.lock)
        return self._recipes[architecture]

    def _delete_old(self, name: str, architecture: str) -> None:
        directories = [path for path in self.directory.glob(f"{name}-{architecture}-*") if path.is_dir()]
        for old in sorted(directories, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old)
            for layer in self.directory.glob(f"{old.name}-*"):
                layer.unlink()


def _files(sources: Path) -> Iterator[Path]:
    for name in _SOURCES:
        path = sources / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts):
                yield file


def _digest(*files: Path, salt: str) -> str:
    digest = hashlib.sha256(salt.encode())
    root = os.path.commonpath(files)
    for file in files:
        digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=tuple(_OVER))
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="of the images; default: of this machine")
    parser.add_argument("--lock", type=Path, default=LOCK, help="the lock file of Debian packages")
    chosen = parser.parse_args()
    os.umask(0o022)
    try:
        architecture = chosen.architecture or native()
        parts = Parts(REPOSITORY, default_cache(), read_lock(chosen.lock))
        with parts.locked():
            made = {name: str(parts.part(name, architecture)) for name in chosen.parts}
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_PACKAGE_GONE if isinstance(error, PackageGoneError) else 1
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
