"""A copy of the interpreter and of the agent's packages whose pages are not in the page cache.

A file page is charged to the cgroup that reads it first. The benchmark has already read the files of its own Python, so
an agent that used the same files would not be charged for them.
"""

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution

from msgspec import Struct

import accelplane

_NOT_COPIED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "config-*")


class UncachedCopy(Struct, frozen=True):
    """Command and environment that run `accelplane` of the copy."""

    program: Sequence[str]
    env: Mapping[str, str]


def copy_uncached(directory: str) -> UncachedCopy:
    """Copies everything into `directory`, which must be on a disk, and evicts its pages."""
    python = f"{directory}/bin/{os.path.basename(os.path.realpath(sys.executable))}"
    os.makedirs(os.path.dirname(python))
    shutil.copy2(os.path.realpath(sys.executable), python)
    stdlib = sysconfig.get_path("stdlib")
    shutil.copytree(
        stdlib,
        f"{directory}/lib/{os.path.basename(stdlib)}",
        ignore=shutil.ignore_patterns(*_NOT_COPIED),
        symlinks=True,
    )
    library = os.path.join(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME") or "")
    if os.path.isfile(library):
        shutil.copy2(library, f"{directory}/lib/")
    site = f"{directory}/site"
    shutil.copytree(os.path.dirname(accelplane.__file__), f"{site}/accelplane")
    for distribution in _required_distributions("accelplane"):
        _copy_distribution(distribution, site)
    os.sync()  # dirty pages cannot be evicted
    for folder, _folders, files in os.walk(directory):
        for name in files:
            _evict_from_page_cache(os.path.join(folder, name))
    return UncachedCopy(
        (python, "-m", "accelplane"),
        {"PYTHONHOME": directory, "PYTHONPATH": site, "LD_LIBRARY_PATH": f"{directory}/lib"},
    )


def _required_distributions(name: str, seen: set[str] | None = None) -> Iterator[Distribution]:
    """The distribution and its dependencies, without those of extras."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # a dependency of another Python version or platform
    yield distribution
    for requirement in distribution.requires or ():
        if "extra ==" not in requirement and (found := re.match(r"[\w.-]+", requirement)):
            yield from _required_distributions(found[0].lower().replace("_", "-"), seen)


def _copy_distribution(distribution: Distribution, site: str) -> None:
    for file in distribution.files or ():
        source = str(distribution.locate_file(file))
        if ".." in file.parts or file.suffix == ".pth" or not os.path.isfile(source):
            continue
        os.makedirs(os.path.dirname(f"{site}/{file}"), exist_ok=True)
        shutil.copy2(source, f"{site}/{file}")


def _evict_from_page_cache(path: str) -> None:
    if os.path.islink(path):
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
