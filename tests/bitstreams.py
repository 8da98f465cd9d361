"""Bitstream files made by hand: GBS, and AOCX as an ELF file in an ELF file."""

import gzip
import json
import struct
from collections.abc import Mapping

INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
NLB0 = "d8424dc4a4a3c413f89e433683f9040b"
NLB3 = "f7df405cbd7acf7222f144b0b93acd18"
HASH = "40007c0623210742000ebc58df6f5343e668b03a"
GBS_MAGIC = b"XeonFPGA\xb7GBSv001"


def metadata(interface: object = INTERFACE, afu: object = NLB0, **more: object) -> bytes:
    """The JSON of a GBS file; `more` are further members of the object with the interface ID."""
    image = {"interface-uuid": interface, "accelerator-clusters": [{"accelerator-type-uuid": afu}], **more}
    return json.dumps({"version": 1, "platform-name": "", "afu-image": image}).encode()


def gbs(text: bytes | None = None, raw: bytes = b"the bitstream", *, length: int | None = None) -> bytes:
    """A GBS file of that metadata and bitstream; `length` is the stated length of the metadata."""
    text = metadata() if text is None else text
    return GBS_MAGIC + struct.pack("<I", len(text) if length is None else length) + text + raw


def elf(sections: Mapping[str, bytes], *, bits: int = 64, order: str = "<", flags: int = 0, kind: int = 1) -> bytes:
    """An ELF file with these sections, all with the given flags and kind."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    start = 64 if bits == 64 else 52
    bodies, entries = bytearray(), [(0,) * 10]
    for name, body in {**sections, ".shstrtab": names}.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        last = name == ".shstrtab"
        entries.append((at, 3 if last else kind, 0 if last else flags, 0, start + len(bodies), len(body), 0, 0, 1, 0))
        bodies += body
    entry = order + ("2I4Q2I2Q" if bits == 64 else "10I")
    word = "Q" if bits == 64 else "I"
    ident = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    header = ident + struct.pack(
        f"{order}2HI3{word}I6H",
        *(1, 62, 1, 0, 0, start + len(bodies), 0, start, 0, 0, struct.calcsize(entry), len(entries), len(entries) - 1),
    )
    return header + bytes(bodies) + b"".join(struct.pack(entry, *fields) for fields in entries)


def aocx(design: bytes | None = None, **texts: str) -> bytes:
    """An AOCX file of that GBS file, and of texts such as `board`."""
    inner = elf({".acl.gbs.gz": gzip.compress(gbs() if design is None else design, 1)})
    described = {"rand_hash": f"{HASH}\n", "board": "pac_a10", "target": "fpga", "version": "19.4", **texts}
    return elf({**{f".acl.{name}": text.encode() for name, text in described.items()}, ".acl.fpga.bin": inner})
