"""Compiles sources of vendors for images of demo workloads, in a root of locked Debian packages.

A recipe with compilers has a script, demo/NAME.build. It runs with the sources below $SOURCES/NAME, and installs into
$DESTDIR. It has the device nodes of this machine, because builds use /dev/null, and no network configuration.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from buildroot import unpack_over
from debian import RecipeError, fetch, read_lock, run
from demo_recipes import DIRECTORY, Demo
from demo_sources import GivenSource, unpack_archive, verify

_LINKS = ("bin", "lib", "lib64", "sbin")
_ENTER = 'mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && exec chroot "$1" /bin/sh -eu /work/build'
# The time of all files that a build embeds.
_EPOCH = "315532800"


def make_directories(root: Path) -> None:
    """Makes the links and directories that packages expect."""
    for link in _LINKS:
        (root / "usr" / link).mkdir(parents=True)
        (root / link).symlink_to(f"usr/{link}")
    for directory in ("dev", "etc", "proc", "run", "sys", "tmp", "var"):
        (root / directory).mkdir()
    (root / "tmp").chmod(0o1777)


def compile_sources(demo: Demo, given: Mapping[str, GivenSource], root: Path, cache: Path) -> None:
    """Runs the script of a recipe and copies what it installs over a root file system."""
    archives = fetch(read_lock(DIRECTORY / f"{demo.name}.build.lock").values(), cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        tools = Path(scratch) / "tools"
        make_directories(tools)
        for archive in archives.values():
            unpack_over(archive, tools)
        (work := tools / "work").mkdir()
        for source in demo.sources:
            unpack_archive(verify(given[source.name]), work / "sources" / source.name)
        (work / "installed").mkdir()
        shutil.copy(DIRECTORY / f"{demo.name}.build", work / "build")
        settings = {
            "CC": "gcc", "DESTDIR": "/work/installed", "SOURCES": "/work/sources", "SOURCE_DATE_EPOCH": _EPOCH,
            "HOME": "/work", "LC_ALL": "C.UTF-8", "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TZ": "UTC",
            "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        }  # fmt: skip
        variables = [f"{name}={value}" for name, value in settings.items()]
        user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        # The mounts end with the namespace. It has processes of its own, for the mount of /proc.
        entered = ("unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", tools)
        run("env", "-i", *variables, *entered)
        if not any((work / "installed").iterdir()):
            raise RecipeError(f"{demo.name}.build: found nothing in $DESTDIR, expected the programs of the demo")
        shutil.copytree(work / "installed", root, dirs_exist_ok=True, symlinks=True)
