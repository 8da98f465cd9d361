"""Installs the wheel of the product and its dependencies, by the hashes of constraints.txt.

Downloaded wheels are kept in the cache, so the next build needs no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from buildroot import PYTHON, TRIPLETS
from debian import run

# pip's options that allow no network; the directory follows.
_FROM_CACHE = ("--no-index", "--find-links")


class Wheels:
    """Wheels for the images of one architecture."""

    def __init__(self, architecture: str, sources: Path, cache: Path) -> None:
        self.architecture = architecture
        self.sources = sources
        self.cache = cache

    def install(self, packages: Path, extra: str) -> None:
        """Installs the wheel of the product, with the dependencies of an extra, into a directory."""
        with tempfile.TemporaryDirectory() as scratch:
            constraints = self.sources / "constraints.txt"
            tools = self._tools(constraints, Path(scratch) / "tools")
            wheel = _wheel(self.sources, Path(scratch), tools)
            wanted = Path(scratch) / "wanted.txt"
            wanted.write_text(
                f"accelplane{f'[{extra}]' if extra else ''} @ {wheel.as_uri()} --hash=sha256:{_sha256(wheel)}\n"
            )
            locked = ("--constraint", constraints, "--requirement", wanted)
            project = tomllib.loads((self.sources / "pyproject.toml").read_text())["project"]
            dependencies = repr((self._platform(), project["dependencies"], project["optional-dependencies"]))
            metadata = constraints.read_bytes() + dependencies.encode()
            kept = self._wheels(
                f"{extra or 'product'}-{self.architecture}", metadata, (*self._platform(), *locked), tools
            )
            _pip(
                "install",
                *_FROM_CACHE,
                kept,
                "--no-compile",
                *self._platform(),
                "--target",
                packages,
                *locked,
                env=tools,
            )

    def _platform(self) -> tuple[str, ...]:
        """pip's options for wheels of the image's Python and C library. They do not depend on the Python of pip."""
        machine = TRIPLETS[self.architecture].partition("-")[0]
        glibc = (f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1))
        platforms = (*glibc, f"manylinux2014_{machine}")
        version = ("--implementation", "cp", "--python-version", PYTHON.removeprefix("python"))
        return (*(f"--platform={platform}" for platform in platforms), *version)

    def _tools(self, constraints: Path, directory: Path) -> dict[str, str]:
        """The environment with pinned setuptools and pip. Debian's pip does not read hashes of constraints."""
        wanted = directory.with_suffix(".txt")
        pins = "".join(_pinned(constraints, ("pip", "setuptools")))
        wanted.write_text(pins)
        environment = dict(os.environ)
        kept = self._wheels("tools", pins.encode(), ("--requirement", wanted), environment)
        _pip("install", *_FROM_CACHE, kept, "--target", directory, "--requirement", wanted, env=environment)
        return environment | {"PYTHONPATH": str(directory), "SOURCE_DATE_EPOCH": "315532800"}

    def _wheels(self, name: str, metadata: bytes, arguments: tuple[str | Path, ...], env: dict[str, str]) -> Path:
        """The directory of the cache with the wheels that the arguments name. Downloads them unless it exists."""
        digest = hashlib.sha256(metadata).hexdigest()[:16]
        directory = self.cache / "wheels" / f"{name}-{digest}"
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache) as scratch:
                made = Path(scratch) / "wheels"
                _pip("download", "--dest", made, *arguments, env=env)
                for own in made.glob("accelplane-*.whl"):
                    own.unlink()
                made.rename(directory)
        return directory


def _wheel(sources: Path, scratch: Path, tools: dict[str, str]) -> Path:
    """The wheel of the product, built from a copy, because setuptools writes into the source tree."""
    copy = scratch / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sources / name, copy)
    shutil.copytree(sources / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    run(sys.executable, "-c", build, cwd=copy, env=tools)
    return next(scratch.glob("*.whl"))


def _pinned(constraints: Path, names: Iterable[str]) -> Iterator[str]:
    """The lines of a constraints file that pin these packages."""
    wanted = False
    for line in constraints.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            wanted = line.partition("==")[0].strip() in names
        if wanted and not line.lstrip().startswith("#"):
            yield line


def _pip(command: str, *arguments: str | Path, env: dict[str, str]) -> None:
    run(
        sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--require-hashes",
        "--only-binary=:all:", *(("--no-warn-conflicts", "--root-user-action=ignore") if command == "install" else ()),
        *arguments, env=env,
    )  # fmt: skip


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
