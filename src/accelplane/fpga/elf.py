"""Where the sections of an ELF file are, for files that come from anywhere (gABI, chapter 4).

pyelftools does this too, for 90 ms and 8 MB at the start of a hook that a container waits for, and with whatever its
parsers raise. This reads the section table and no more of a file of hundreds of megabytes, within limits, and knows one
kind of error. Tables of more than 4096 sections, and compressed ones, are refused; designs have neither.
"""

import os
import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

_SECTIONS_LIMIT = 4096
_STRINGS_LIMIT = 1024 * 1024
_ENTRY_LIMIT = 256
_NO_BITS = 8  # SHT_NOBITS: takes no room in the file
_COMPRESSED = 0x800  # SHF_COMPRESSED


class ElfError(Exception):
    """The bytes are no ELF file, or one cut short."""


class Window(NamedTuple):
    """A piece of an open file."""

    descriptor: int
    start: int
    size: int

    def part(self, offset: int, size: int) -> "Window":
        """A piece of the piece. Raises `ElfError` where it is not within."""
        if offset + size > self.size:
            raise ElfError(f"{size} bytes at {offset} are beyond its end at {self.size}, is the file complete?")
        return Window(self.descriptor, self.start + offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from it. Raises `ElfError`."""
        part = self.part(offset, size)
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece = os.pread(self.descriptor, size, part.start + part.size - size)
            except OSError as error:
                raise ElfError(f"cannot be read: {error.strerror}") from None
            if not piece:
                raise ElfError("has become shorter while it was read")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class _Layout(NamedTuple):
    """Of one class (32 or 64 bits) and byte order: table offset, then size, number and names' index; a section."""

    table: struct.Struct
    table_at: int
    counts: struct.Struct
    counts_at: int
    section: struct.Struct


class _Section(NamedTuple):
    """The first fields of a section's entry; `name` is where it begins among the names."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int


def sections(file: Window, wanted: Collection[str]) -> Mapping[str, Window]:
    """Those of the wanted sections that are there, the first of each name. Raises `ElfError`."""
    layout = _layout(file.read(0, min(file.size, 64)))
    header = file.read(0, layout.counts_at + layout.counts.size)
    (table,) = layout.table.unpack_from(header, layout.table_at)
    stride: int
    count: int
    names_index: int
    stride, count, names_index = layout.counts.unpack_from(header, layout.counts_at)
    if not table or not count:
        return {}
    if not layout.section.size <= stride <= _ENTRY_LIMIT or count > _SECTIONS_LIMIT or names_index >= count:
        raise ElfError(f"a table of {count} sections of {stride} bytes, names in number {names_index}: makes no sense")
    data = file.read(table, stride * count)
    entries = [_Section(*layout.section.unpack_from(data, stride * index)[:6]) for index in range(count)]
    strings = entries[names_index]
    if strings.size > _STRINGS_LIMIT:
        raise ElfError(f"{strings.size} bytes of section names, at most {_STRINGS_LIMIT} are possible")
    names = file.read(strings.offset, strings.size)
    found: dict[str, Window] = {}
    # No name is read that is longer than those: thousands of sections may have one name of a megabyte.
    longest = max(map(len, wanted)) + 1
    for entry in entries:
        name = names[entry.name : entry.name + longest].partition(b"\0")[0].decode("ascii", "replace")
        if name not in wanted or name in found or entry.kind == _NO_BITS:
            continue
        if entry.flags & _COMPRESSED:
            raise ElfError(f"section {name} is compressed by the linker, expected it as it is")
        found[name] = file.part(entry.offset, entry.size)
    return found


def _layout(ident: bytes) -> _Layout:
    if not ident:
        raise ElfError("is empty, expected an ELF file")
    if ident[:4] != b"\x7fELF" or len(ident) < 6 or ident[4] not in (1, 2) or ident[5] not in (1, 2):
        raise ElfError(f"begins with {ident[:6].hex(' ')}, expected 7f 45 4c 46 and class and byte order (ELF)")
    order = "<" if ident[5] == 1 else ">"
    if ident[4] == 1:
        return _Layout(_struct(order, "I"), 32, _struct(order, "3H"), 46, _struct(order, "10I"))
    return _Layout(_struct(order, "Q"), 40, _struct(order, "3H"), 58, _struct(order, "2I4Q2I2Q"))


def _struct(order: str, fields: str) -> struct.Struct:
    return struct.Struct(order + fields)
