"""Verifies the programs and libraries of a root file system that cannot run here: their machine, and what they need.

The layout of ELF files is that of the System V ABI (elf.5).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from debian import RecipeError

MACHINES = {"amd64": 62, "arm64": 183}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5


def check_libraries(root: Path, architecture: str) -> None:
    """Raises `RecipeError` if a program is for another machine, or if a library or loader that it needs is missing."""
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and _is_elf(file)]
    present = {file.name for file in root.rglob("*.so*")}
    for file in files:
        data = file.read_bytes()
        name = file.relative_to(root)
        machine = int.from_bytes(data[18:20], "little")
        if machine != MACHINES[architecture]:
            raise RecipeError(
                f"{name}: found ELF machine {machine}, expected {MACHINES[architecture]} ({architecture})"
            )
        try:
            libraries = needed(data)
        except (struct.error, ValueError, OverflowError) as error:
            raise RecipeError(f"{name}: found an invalid ELF file: {error}; is the package complete?") from error
        for library in libraries:
            if Path(library).name not in present:
                raise RecipeError(f"{name}: needs {library}, which is missing; add its package to contents.py")


def needed(data: bytes) -> list[str]:
    """The dynamic loader and the libraries that an ELF file of 64 bits names."""
    headers = list(_program_headers(data))
    found = [_text(data, offset) for kind, offset, _, _ in headers if kind == _PT_INTERP]
    for kind, offset, _, size in headers:
        if kind == _PT_DYNAMIC:
            entries = [struct.unpack_from("<qQ", data, at) for at in range(offset, offset + size, 16)]
            # Entries after the terminating one have no meaning.
            end = next((number for number, (tag, _) in enumerate(entries) if tag == 0), len(entries))
            tables = [value for tag, value in entries[:end] if tag == _DT_STRTAB]
            names = [value for tag, value in entries[:end] if tag == _DT_NEEDED]
            if tables:
                found += [_text(data, _file_offset(headers, tables[0]) + name) for name in names]
    return found


def _is_elf(file: Path) -> bool:
    if file.is_symlink():
        return False
    with file.open("rb") as stream:
        return stream.read(5) == b"\x7fELF\x02"


def _program_headers(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Type, offset in the file, address and size in the file of each program header."""
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, table + number * size)
        yield kind, offset, address, length


def _file_offset(headers: list[tuple[int, int, int, int]], address: int) -> int:
    for kind, offset, begin, size in headers:
        if kind == _PT_LOAD and begin <= address < begin + size:
            return offset + address - begin
    raise RecipeError(f"ELF: found the string table at {address:#x}, expected it in a loaded segment")


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
