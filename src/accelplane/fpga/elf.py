"""Finds sections of untrusted ELF files (gABI, chapter 4).

pyelftools would add 90 ms and 8 MB to the start of the hook, and raises many kinds of exceptions. This module reads
only the section table, with limits on its size, and raises one kind. Tables of more than 4096 sections and compressed
sections are rejected; designs have neither.
"""

import os
import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

_SECTIONS_LIMIT = 4096
_STRINGS_LIMIT = 1024 * 1024
_ENTRY_LIMIT = 256
_NO_BITS = 8  # SHT_NOBITS: no data in the file
_COMPRESSED = 0x800  # SHF_COMPRESSED


class ElfError(Exception):
    """Not an ELF file, a truncated one, or not the sections of an AOCX file."""


class Window(NamedTuple):
    """A range of an open file."""

    descriptor: int
    start: int
    size: int

    def part(self, offset: int, size: int) -> "Window":
        """Returns a range of the window. Raises `ElfError` if it exceeds the window."""
        if offset + size > self.size:
            raise ElfError(f"{size} bytes at {offset} exceed its size of {self.size}; the file is incomplete")
        return Window(self.descriptor, self.start + offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """Returns bytes of the window. Raises `ElfError`."""
        part = self.part(offset, size)
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece = os.pread(self.descriptor, size, part.start + part.size - size)
            except OSError as error:
                raise ElfError(f"cannot be read: {error.strerror}") from None
            if not piece:
                raise ElfError("was truncated while it was read")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class _Section(NamedTuple):
    """The first fields of a section header; `name` is an offset in the section of names."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int


def sections(file: Window, section_names: Collection[str]) -> Mapping[str, Window]:
    """Returns the first section of each name, without missing ones. Raises `ElfError`."""
    header, section = _layout(file.read(0, min(file.size, 64)))
    fields: tuple[int, ...] = header.unpack(file.read(0, header.size))
    table, stride, count, names_index = fields
    if not table or not count:
        return {}
    if not section.size <= stride <= _ENTRY_LIMIT or count > _SECTIONS_LIMIT or names_index >= count:
        raise ElfError(f"invalid section table: {count} sections of {stride} bytes, names in section {names_index}")
    data = file.read(table, stride * count)
    entries = [_Section(*section.unpack_from(data, stride * index)[:6]) for index in range(count)]
    strings = entries[names_index]
    if strings.size > _STRINGS_LIMIT:
        raise ElfError(f"{strings.size} bytes of section names, expected at most {_STRINGS_LIMIT}")
    names = file.read(strings.offset, strings.size)
    found: dict[str, Window] = {}
    # Limits the time: thousands of sections may share one name of a megabyte.
    longest = max(map(len, section_names)) + 1
    for entry in entries:
        name = names[entry.name : entry.name + longest].partition(b"\0")[0].decode("ascii", "replace")
        if name not in section_names or name in found or entry.kind == _NO_BITS:
            continue
        if entry.flags & _COMPRESSED:
            raise ElfError(f"section {name} is compressed (SHF_COMPRESSED), expected an uncompressed one")
        found[name] = file.part(entry.offset, entry.size)
    return found


def _layout(ident: bytes) -> tuple[struct.Struct, struct.Struct]:
    """The table's offset and the counts in the header, and a section, of the class (32 or 64 bits) and byte order."""
    if not ident:
        raise ElfError("is empty, expected an ELF file")
    if ident[:4] != b"\x7fELF" or len(ident) < 6 or ident[4] not in (1, 2) or ident[5] not in (1, 2):
        raise ElfError(f"begins with {ident[:6].hex(' ')}, expected 7f 45 4c 46 and class and byte order (ELF)")
    order = "<" if ident[5] == 1 else ">"
    header, section = ("32xI10x3H", "10I") if ident[4] == 1 else ("40xQ10x3H", "2I4Q2I2Q")
    return struct.Struct(order + header), struct.Struct(order + section)
