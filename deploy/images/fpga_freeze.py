"""Writes the compiled modules of the FPGA host program and the table of them (fpga_host.py runs it in the build root).

    python3.11 fpga_freeze.py SOURCES LIBRARY MODULE… --exclude=MODULE…

Writes into the working directory: modules.S, which includes module.N, modules.h, and `imported`, the names of all
modules that were found or missed.
"""

from __future__ import annotations

import argparse
import json
import marshal
import sys
from modulefinder import ModuleFinder
from pathlib import Path


def freeze(finder: ModuleFinder, names: list[str], directory: Path) -> None:
    """Compiles what the modules import, directly and indirectly."""
    for name in names:
        finder.import_hook(name)
    frozen = {name: module for name, module in sorted(finder.modules.items()) if module.__file__}
    assembly, table = [".section .rodata"], []
    for number, (name, module) in enumerate(frozen.items()):
        code = compile(Path(module.__file__).read_bytes(), f"<{name}>", "exec", dont_inherit=True, optimize=2)
        (directory / f"module.{number}").write_bytes(data := marshal.dumps(code))
        assembly += [f".globl module_{number}", f'module_{number}: .incbin "module.{number}"']
        table.append(f"MODULE({number}, {json.dumps(name)}, {len(data)}, {int(bool(module.__path__))})")
    assembly.append('.section .note.GNU-stack,"",%progbits')
    for file, lines in (
        ("modules.S", assembly),
        ("modules.h", table),
        ("imported", finder.modules | finder.badmodules),
    ):
        (directory / file).write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources")
    parser.add_argument("library")
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--exclude", action="append", default=[])
    chosen = parser.parse_args()
    freeze(ModuleFinder([chosen.sources, chosen.library], excludes=chosen.exclude), chosen.modules, Path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
