"""Builds what runs on nodes' hosts, where there may be no Python: the FPGA hook and tool, as one static program.

    python3 deploy/images/fpga_host.py DIRECTORY [--architecture amd64|arm64] [--sources DIRECTORY]

Puts into the directory `fpga_tool`, `fpgatool` and `intel-fpga-crihook`, hard links to one file. It is Debian's
interpreter as a static library, linked with the compiled modules (see fpga_host.c); it needs nothing but a
Linux kernel of the architecture. docs/decisions/0015-fpga-host-programs.md compares this with other ways.

The compiler and the interpreter that compiles the modules are those of the build root (buildroot.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from buildroot import GCC, PYTHON, TRIPLETS, BuildRoot, native
from debian import ARCHITECTURES, RELEASE, Lock, RecipeError, default_cache, fetch, read_lock, select, unpack

PROGRAMS = ("fpga_tool", "fpgatool", "intel-fpga-crihook")
COMMANDS = ("accelplane.cli.fpgahook", "accelplane.cli.fpgatool")
# Libraries and headers of the program. The C library of the cross compiler gets no security updates.
DEBIAN = ("libc6-dev", f"lib{PYTHON}-dev", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "zlib1g-dev")

# What the interpreter imports by itself.
FOR_THE_INTERPRETER = ("encodings.aliases", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "traceback")

# What is imported for types only, or where something is not there, or by functions that are not called.
UNWANTED = (
    "accelplane.host.inotify", "accelplane.host.uevent", "accelplane.plugins", "msgspec", "_bz2", "_lzma", "_pickle",
    "_posixshmem", "ast", "asyncio", "bz2", "copy", "ctypes", "dis", "doctest", "dummy_threading", "email",
    "encodings.mbcs", "fractions", "getopt", "gettext", "hashlib", "importlib.metadata", "inspect", "locale", "logging",
    "lzma", "nt", "ntpath", "numbers", "org", "pdb", "pickle", "pydoc", "socket", "ssl", "statistics", "subprocess",
    "tarfile", "textwrap", "threading", "tokenize", "tracemalloc", "unittest", "urllib", "winreg", "zipfile",
)  # fmt: skip

# Modules in C that are imported by C, or without being named.
ALWAYS = ("_abc", "_codecs", "_imp", "_io", "_signal", "_string", "_thread", "_warnings", "_weakref", "atexit",
          "faulthandler", "gc", "marshal", "posix")  # fmt: skip


def build(directory: Path, sources: Path, architecture: str, cache: Path, lock: Lock) -> None:
    """Builds, tries out where it can run here, and puts it into the directory."""
    build_root = BuildRoot(cache, lock)
    with build_root.scratch() as scratch:
        archives = fetch(select(lock, RELEASE, architecture, DEBIAN), cache)
        made = _linked(build_root, scratch, sources, archives.values(), architecture)
        if architecture == native():
            _try_out(made)
        directory.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            (directory / name).unlink(missing_ok=True)
        shutil.copy(made, directory / PROGRAMS[0])
        for name in PROGRAMS[1:]:
            os.link(directory / PROGRAMS[0], directory / name)


def _linked(build_root: BuildRoot, scratch: Path, sources: Path, archives: Iterable[Path], architecture: str) -> Path:
    debian = scratch / "debian"
    for archive in archives:
        unpack(archive, debian)
    triplet = TRIPLETS[architecture]
    (source := scratch / "src").mkdir()
    shutil.copytree(sources / "src", source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("fpga_freeze.py", "fpga_host.c"):
        shutil.copy(Path(__file__).with_name(name), scratch)
    # The order of sets of texts depends on the seed.
    library = f"debian/usr/lib/{PYTHON}"
    freeze = [f"/usr/bin/{PYTHON}", "-BSs", "fpga_freeze.py", "src", library, *COMMANDS, *FOR_THE_INTERPRETER]
    excluded = [f"--exclude={name}" for name in UNWANTED]
    build_root.run(*freeze, *excluded, directory=scratch, env={"PYTHONHASHSEED": "0"})
    _write_builtins(scratch, scratch / library)
    libraries = [
        str(next((debian / "usr/lib").rglob(name)).relative_to(scratch)) for name in (f"lib{PYTHON}.a", "libz.a")
    ]
    headers = ("debian/usr/include", f"debian/usr/include/{PYTHON}", f"debian/usr/include/{triplet}", ".")
    build_root.run(
        f"/usr/bin/{triplet}-{GCC}", "-O2", "-static", "-Wl,--build-id=none,--gc-sections,-s",
        *(f"-I{path}" for path in headers), f"-Ldebian/usr/lib/{triplet}", "-o", "program", "fpga_host.c", "modules.S",
        *libraries, "-lm", directory=scratch,
    )  # fmt: skip
    return scratch / "program"


def _write_builtins(scratch: Path, library: Path) -> None:
    """The table of modules in C: those that are imported and in the library's own table, and what makes each."""
    known = dict(re.findall(r'\{"(\w+)", (\w+)\}', next(library.glob("config-*/config.c")).read_text()))
    imported = set((scratch / "imported").read_text().split())
    builtins = sorted(known.keys() & {*imported, *ALWAYS} - {"builtins", "sys"})
    (scratch / "builtins.h").write_text("".join(f'BUILTIN("{name}", {known[name]})\n' for name in builtins))


def _try_out(program: Path) -> None:
    """Whether every command starts; their work is tried by the tests."""
    tool, hook = (program.with_name(name) for name in PROGRAMS[::2])
    for name in (tool, hook):
        os.link(program, name)
    for command, status, expected in (
        ((tool, "list"), 0, "Detected FPGA FMEs: "),
        ((tool, "info", "-b", "/x.gbs"), 1, "fpga_tool: /x.gbs: No such file or directory"),
        ((hook,), 1, "intel-fpga-crihook: the container's state: not JSON"),
        ((hook, "-h"), 0, "Usage of intel-fpga-crihook:"),
    ):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={},
            check=False,
        )
        if done.returncode != status or expected not in done.stdout:
            raise RecipeError(f"{command[0].name} {' '.join(map(str, command[1:]))}: {done.returncode}\n{done.stdout}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="of the hosts; default: of this machine")
    parser.add_argument("--sources", type=Path, default=Path(__file__).parents[2], help="the repository")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of downloads")
    chosen = parser.parse_args(arguments)
    chosen.cache.mkdir(parents=True, exist_ok=True)
    try:
        architecture = chosen.architecture or native()
        build(chosen.directory, chosen.sources.resolve(), architecture, chosen.cache.resolve(), read_lock())
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
