"""A double of the kernel's driver, for `Call`: it reads every structure, and programs ports in the tree."""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from fpgatrees import Card
from trees import write


class Driver:
    """The driver of one card. `answers` are errors (errno) of the first calls."""

    def __init__(self, card: Card, afu: str, answers: Iterable[int] = (), bitmap: int = 0) -> None:
        self.card = card
        self.afu = afu
        self.answers = list(answers)
        self.bitmap = bitmap
        self.programmed: list[tuple[str, int, bytes]] = []
        self.calls: list[tuple[str, int]] = []

    def __call__(self, node: str, request: int, argument: bytearray | int) -> int:
        name = node.rpartition("/")[2]
        self.calls.append((name, request))
        if self.answers:
            code = self.answers.pop(0)
            if self.bitmap and isinstance(argument, bytearray):
                struct.pack_into("<Q", argument, 24, self.bitmap)
            raise OSError(code, os.strerror(code))
        if request & 0xFF == 0x80:
            assert isinstance(argument, bytearray)
            self.program(name, argument)
        return 0

    def program(self, name: str, argument: bytearray) -> None:
        """The ioctl of the FME."""
        argsz, flags, port, size, address = struct.unpack_from("<4IQ", argument)
        if argsz != len(argument) or len(argument) != (24 if self.card.family == "dfl" else 32) or flags:
            raise OSError(errno.EINVAL, "the structure")
        self.programmed.append((name, port, ctypes.string_at(address, size)))
        for path in self.ports():
            if (path / "id").read_text() == f"{port}\n":
                write(path / "afu_id", f"{self.afu}\n")

    def ports(self) -> list[Path]:
        """The directories of the card's ports."""
        return sorted(self.card.pci.parent.glob(f"*/*/*/{self.card.name('port', 0)[:-1]}*"))
