"""Packages of the Python package index in images of demo workloads, pinned with their hashes by demo/NAME.wheels."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from debian import RecipeError, run
from demo_recipes import DIRECTORY, Demo

# Python's version in each release of Debian.
_PYTHON = {"bookworm": "3.11", "trixie": "3.13"}
_TARGET = "usr/lib/python3/dist-packages"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_DATA_LIBRARY = re.compile(r"[^/]+\.data/data/lib/([\w+-]+\.so[\w.]*)")
_HEADER = "# Wheels of the image. demo_images.py update writes this file.\n"


def update_wheels(demo: Demo) -> int:
    """Pins the wheels of a recipe and everything that they depend on. Returns their number."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        arguments = ("--dry-run", "--ignore-installed", "--target", scratch, "--report", report, *demo.wheels)
        _pip("install", *_platform(demo), *arguments)
        installed = json.loads(report.read_bytes())["install"]
    lines = sorted(
        f"{each['metadata']['name']}=={each['metadata']['version']} "
        f"--hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}\n"
        for each in installed
    )
    _file(demo).write_text(_HEADER + "".join(lines))
    return len(lines)


def install_wheels(demo: Demo, root: Path, cache: Path) -> None:
    """Installs the pinned wheels into a root file system. Downloads those that the cache lacks."""
    digest = hashlib.sha256(_file(demo).read_bytes()).hexdigest()[:16]
    directory = cache / "wheels" / f"{demo.name}-{digest}"
    locked = ("--require-hashes", "--no-deps", "--requirement", _file(demo))
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _pip("download", *_platform(demo), "--dest", made := Path(scratch) / "wheels", *locked)
            made.rename(directory)
    offline = ("--no-index", "--find-links", directory, "--no-compile", "--root-user-action=ignore")
    _pip("install", *_platform(demo), *offline, "--target", root / _TARGET, *locked)
    for wheel in sorted(directory.iterdir()):
        install_libraries(wheel, root / _LIBRARIES)


def install_libraries(wheel: Path, target: Path) -> None:
    """Installs the libraries that a wheel has for the prefix, which `pip install --target` loses."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if (match := _DATA_LIBRARY.fullmatch(entry.filename)) and not (target / match[1]).exists():
                with archive.open(entry) as source, (target / match[1]).open("xb") as library:
                    shutil.copyfileobj(source, library)


def _file(demo: Demo) -> Path:
    return DIRECTORY / f"{demo.name}.wheels"


def _platform(demo: Demo) -> tuple[str, ...]:
    if demo.release not in _PYTHON:
        raise RecipeError(f"{demo.name}: found release {demo.release}, expected one of {', '.join(_PYTHON)}")
    systems = (f"manylinux_2_{minor}_x86_64" for minor in range(36, 16, -1))
    platforms = (f"--platform={name}" for name in (*systems, "manylinux2014_x86_64"))
    return (*platforms, "--implementation=cp", f"--python-version={_PYTHON[demo.release]}")


def _pip(command: str, *arguments: str | Path) -> None:
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:")
    run(sys.executable, "-m", "pip", command, *options, *arguments)
