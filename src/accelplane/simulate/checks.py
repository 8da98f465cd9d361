"""Validation of descriptions of simulated devices: ranges of numbers, formats of addresses and IDs."""

import re
from collections.abc import Iterator

import msgspec

MAX_INDEX = 1023
MAX_NUMA_NODES = 512
MAX_VFS = 127

PCI_ID = re.compile(r"0x[0-9a-f]{4}")
PCI_CLASS = re.compile(r"0x[0-9a-f]{6}")
BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


def bounded(key: str, value: float | None, most: int, *, least: int = 0) -> str | None:
    """Returns a message if the number is out of range, else None."""
    if value is None or least <= value <= most:
        return None
    return f"{key} is {value}, expected {least} to {most}"


def spelled(key: str, value: str | None, pattern: re.Pattern[str], example: str) -> str | None:
    """Returns a message if the text has another format, else None."""
    if value is None or pattern.fullmatch(value):
        return None
    return f"{key} is {value[:80]!a}, expected the form {example}"


class Described(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """A part of the description of a node. Creating it raises `ValueError` with the first of its `problems`."""

    def __post_init__(self) -> None:
        for problem in filter(None, self.problems()):
            raise ValueError(problem)

    def problems(self) -> Iterator[str | None]:
        """A message for each invalid field, None for others."""
        yield from ()


class Placed(Described, frozen=True, kw_only=True):
    """A PCI device in it, with an address and a NUMA node; the defaults follow from the number of the device."""

    bdf: str | None = None
    numa_node: int | None = None

    def problems(self) -> Iterator[str | None]:
        yield spelled("bdf", self.bdf, BDF, "0000:03:00.0")
        yield bounded("numa-node", self.numa_node, MAX_NUMA_NODES - 1, least=-1)
