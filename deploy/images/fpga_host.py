"""Builds what runs on nodes' hosts, where there may be no Python: the FPGA hook and tool, as one static program.

    python3 deploy/images/fpga_host.py DIRECTORY [--sources DIRECTORY]

Puts into the directory `fpga_tool`, `fpgatool` and `intel-fpga-crihook`, hard links to one file. It is Debian's
interpreter as a static library, linked with the compiled modules (see fpga_host.c); it needs nothing but a
Linux kernel of the machine's architecture. docs/decisions/0015-fpga-host-programs.md compares this with other ways.

Needs Debian 12, its Python 3.11, gcc and libc6-dev; other packages are downloaded and unpacked, not installed.
"""

from __future__ import annotations

import argparse
import json
import marshal
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path

PYTHON = "python3.11"
PROGRAMS = ("fpga_tool", "fpgatool", "intel-fpga-crihook")
COMMANDS = ("accelplane.cli.fpgahook", "accelplane.cli.fpgatool")
DEBIAN = (f"lib{PYTHON}-dev", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "zlib1g-dev")

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


class RecipeError(Exception):
    """The program cannot be built; the message says why and what to do."""


def build(directory: Path, sources: Path) -> None:
    """Builds, tries out, and puts it into the directory."""
    if f"python{sys.version_info[0]}.{sys.version_info[1]}" != PYTHON:
        raise RecipeError(f"this is Python {sys.version.split()[0]}; modules are compiled by {PYTHON}, to run in it")
    with tempfile.TemporaryDirectory() as scratch:
        made = _linked(Path(scratch), sources)
        _try_out(made)
        directory.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            (directory / name).unlink(missing_ok=True)
        shutil.copy(made, directory / PROGRAMS[0])
        for name in PROGRAMS[1:]:
            os.link(directory / PROGRAMS[0], directory / name)


def _linked(scratch: Path, sources: Path) -> Path:
    debian = scratch / "debian"
    _run("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *DEBIAN, cwd=scratch)
    for archive in sorted(scratch.glob("*.deb")):
        _run("dpkg-deb", "-x", archive, debian)
    # In a process of its own, where sets of texts have one order always.
    _run(sys.executable, "-S", __file__, "--freeze", debian / "usr/lib" / PYTHON, scratch, "--sources", sources,
         env={**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip
    libraries = [next((debian / "usr/lib").rglob(name)) for name in (f"lib{PYTHON}.a", "libz.a")]
    source = Path(__file__).with_suffix(".c")
    headers = (debian / "usr/include", debian / "usr/include" / PYTHON, scratch)
    _run(
        "gcc", "-O2", "-static", "-Wl,--build-id=none,--gc-sections,-s", *(f"-I{path}" for path in headers),
        "-o", "program", source, "modules.S", *libraries, "-lm", cwd=scratch,
    )  # fmt: skip
    return scratch / "program"


def freeze(library: Path, scratch: Path, sources: Path) -> None:
    """Writes what the commands import, compiled, and the tables of it."""
    finder = ModuleFinder([str(sources / "src"), str(library)], excludes=UNWANTED)
    for name in (*COMMANDS, *FOR_THE_INTERPRETER):
        finder.import_hook(name)
    frozen = {name: module for name, module in sorted(finder.modules.items()) if module.__file__}
    # In the library's own table: those in C, and what makes each.
    known = dict(re.findall(r'\{"(\w+)", (\w+)\}', next(library.glob("config-*/config.c")).read_text()))
    builtins = sorted(known.keys() & {*finder.modules, *finder.badmodules, *ALWAYS} - {"builtins", "sys"})
    assembly, table = [".section .rodata"], []
    for number, (name, module) in enumerate(frozen.items()):
        code = compile(Path(module.__file__).read_bytes(), f"<{name}>", "exec", dont_inherit=True, optimize=2)
        (scratch / f"module.{number}").write_bytes(data := marshal.dumps(code))
        assembly += [f".globl module_{number}", f'module_{number}: .incbin "module.{number}"']
        table.append(f"MODULE({number}, {json.dumps(name)}, {len(data)}, {int(bool(module.__path__))})")
    assembly.append('.section .note.GNU-stack,"",@progbits')
    made_by = [f'BUILTIN("{name}", {known[name]})' for name in builtins]
    for name, lines in (("modules.S", assembly), ("modules.h", table), ("builtins.h", made_by)):
        (scratch / name).write_text("\n".join(lines) + "\n")


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


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except FileNotFoundError:
        raise RecipeError(f"{command[0]}: not found; on Debian: apt-get install gcc libc6-dev dpkg apt") from None
    if done.returncode:
        raise RecipeError(f"{' '.join(map(str, command[:6]))}: failed with {done.returncode}\n{done.stdout[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="+")
    parser.add_argument("--sources", type=Path, default=Path(__file__).parents[2], help="the repository")
    parser.add_argument("--freeze", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.freeze:
            freeze(chosen.directory[0], chosen.directory[1], chosen.sources)
        else:
            build(chosen.directory[0], chosen.sources)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
