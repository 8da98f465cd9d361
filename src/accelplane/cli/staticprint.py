"""Generates an executable of a few hundred bytes that prints a text, for containers without an interpreter.

node-feature-discovery runs hooks in its worker's container, whose image has neither Python nor a shell. So the hook
is machine code without libraries: write(1, text), then exit(0), or exit(1) after a short write. Sources: System V ABI
with the AMD64 supplement (ELF-64), elf(5), syscall(2).
"""

import logging
import os
import struct

from accelplane.node import atomic_file

log = logging.getLogger(__name__)

MACHINE = "x86_64"

_BASE = 0x400000
_HEADER, _PROGRAM_HEADER = 64, 56
_LONGEST = 64 * 1024
_EXECUTABLE, _X86_64, _CURRENT = 2, 62, 1
_LOAD, _GNU_STACK = 1, 0x6474E551
_EXECUTE, _WRITE, _READ = 1, 2, 4


def install(path: str, text: str) -> None:
    """Installs the executable that prints `text` as a hook. Raises `OSError`, or `ValueError` as `program` does."""
    if os.uname().machine != MACHINE:
        log.warning("%s: not installed, it is a program for %s", path, MACHINE)
        return
    # NFD ignores names that begin with a dot, so it never runs an incomplete program.
    atomic_file.replace(path, program(text.encode()), prefix=f".{os.path.basename(path)}", mode=0o755)
    log.info("%s: installed, prints %s", path, text.strip() or "nothing")


def program(text: bytes) -> bytes:
    """Returns an x86-64 Linux executable that prints `text`. Raises `ValueError` if it exceeds a pipe's buffer."""
    if len(text) > _LONGEST:
        raise ValueError(f"{len(text)} bytes of text, expected at most {_LONGEST}")
    start = _HEADER + 2 * _PROGRAM_HEADER
    place = _BASE + start + len(_code(0, 0))
    code = _code(place, len(text))
    size = start + len(code) + len(text)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF" + bytes((2, 1, _CURRENT)),
        _EXECUTABLE, _X86_64, _CURRENT, _BASE + start, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, 2, 0, 0, 0,
    )  # fmt: skip
    load = struct.pack("<IIQQQQQQ", _LOAD, _READ | _EXECUTE, 0, _BASE, _BASE, size, size, 0x1000)
    # Without PT_GNU_STACK the kernel makes the stack and other mappings executable.
    stack = struct.pack("<IIQQQQQQ", _GNU_STACK, _READ | _WRITE, 0, 0, 0, 0, 0, 16)
    return header + load + stack + code + text


def _code(place: int, length: int) -> bytes:
    return b"".join(
        (
            b"\xb8\x01\x00\x00\x00",  # mov eax, 1 (write)
            b"\xbf\x01\x00\x00\x00",  # mov edi, 1
            b"\xbe" + struct.pack("<I", place),  # mov esi, text
            b"\xba" + struct.pack("<I", length),  # mov edx, length
            b"\x0f\x05",  # syscall
            b"\x31\xff",  # xor edi, edi
            b"\x3d" + struct.pack("<I", length),  # cmp eax, length
            b"\x40\x0f\x95\xc7",  # setne dil
            b"\xb8\x3c\x00\x00\x00",  # mov eax, 60 (exit)
            b"\x0f\x05",  # syscall
        )
    )
