"""AOCX files: OpenCL designs. An ELF file contains an ELF file, which contains a compressed GBS file.

Texts are in sections `.acl.…` of the outer file; `.acl.rand_hash` is the id of the design. `.acl.fpga.bin` is the
inner file, and its section `.acl.gbs.gz` the GBS file. Only these sections are read, and the size of the decompressed
file is limited.
"""

import zlib
from collections.abc import Iterator, Mapping

from accelplane.fpga.elf import ElfError, Window, sections
from accelplane.fpga.gbs import BITSTREAM_LIMIT, HEAD_LIMIT

_TEXTS = {".acl.board": "Board", ".acl.target": "Target", ".acl.rand_hash": "Hash", ".acl.version": "Version"}
_TEXT_LIMIT = 64 * 1024
_DESIGN = ".acl.fpga.bin"
_PACKED = ".acl.gbs.gz"
_GZIP = 16 + zlib.MAX_WBITS
_STEP = 256 * 1024


def parse(file: Window) -> tuple[Mapping[str, str], Window | None]:
    """Returns the texts Board, Target, Hash and Version, and the compressed GBS file, None without a design.

    Raises `ElfError`.
    """
    outer = sections(file, (*_TEXTS, _DESIGN))
    texts = {word: _text(outer, section) for section, word in _TEXTS.items()}
    if _DESIGN not in outer:
        return texts, None
    try:
        packed = sections(outer[_DESIGN], (_PACKED,)).get(_PACKED)
    except ElfError as error:
        raise ElfError(f"its section {_DESIGN} {error}") from None
    if packed is None:
        raise ElfError(f"its section {_DESIGN} has no section {_PACKED}")
    return texts, packed


def unpack(packed: Window) -> Iterator[bytes]:
    """Yields the GBS file in pieces. Raises `ElfError`, for an incomplete file at the end."""
    room = HEAD_LIMIT + BITSTREAM_LIMIT
    member = zlib.decompressobj(_GZIP)
    try:
        for offset in range(0, packed.size, _STEP):
            if member.eof:
                raise ElfError(f"its section {_PACKED} has data after the end of the gzip member")
            rest = packed.read(offset, min(_STEP, packed.size - offset))
            full = False  # after a full piece zlib may hold more output
            while rest or full:
                piece = member.decompress(rest, _STEP)
                rest, full = member.unconsumed_tail, len(piece) == _STEP
                room -= len(piece)
                if room < 0:
                    raise ElfError(f"its section {_PACKED} unpacks to more than {BITSTREAM_LIMIT} bytes")
                if piece:
                    yield piece
    except zlib.error as error:
        raise ElfError(f"its section {_PACKED} cannot be unpacked: {error}") from None
    except ElfError as error:
        raise ElfError(f"its section {_PACKED} {error}") from None
    if not member.eof:
        raise ElfError(f"its section {_PACKED} ends early; the file is incomplete")
    if member.unused_data:
        raise ElfError(f"its section {_PACKED} has data after the end of the gzip member")


def _text(found: Mapping[str, Window], section: str) -> str:
    window = found.get(section)
    if window is None:
        return ""
    if window.size > _TEXT_LIMIT:
        raise ElfError(f"its section {section} has {window.size} bytes, expected at most {_TEXT_LIMIT}")
    return window.read(0, window.size).decode("utf-8", "replace").strip(" \t\r\n\0")
