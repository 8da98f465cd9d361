"""Validation of descriptions of simulated devices: ranges of numbers, formats of addresses and IDs."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, get_type_hints

import msgspec

MAX_INDEX = 1023
MAX_NUMA_NODES = 512
MAX_VFS = 127

PCI_ID = re.compile(r"0x[0-9a-f]{4}")
PCI_CLASS = re.compile(r"0x[0-9a-f]{6}")
BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")


class Range(NamedTuple):
    """The range of a number. Annotates a field."""

    least: int
    most: int

    def problem(self, key: str, value: float | None) -> str | None:
        """Returns a message if the number is out of range, else None."""
        if value is None or self.least <= value <= self.most:
            return None
        return f"{key} is {value}, expected {self.least} to {self.most}"


class Form(NamedTuple):
    """The format of a text, or of each one of a list. Annotates a field."""

    pattern: re.Pattern[str]
    example: str

    def problem(self, key: str, value: str | Sequence[str] | None) -> str | None:
        """Returns a message if a text has another format, else None."""
        for text in (value,) if isinstance(value, str) else value or ():
            if not self.pattern.fullmatch(text):
                return f"{key} is {text[:80]!a}, expected the form {self.example}"
        return None


class Spec(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """A part of the description of a node. Creating it raises `ValueError` with the first of its `problems`."""

    def __post_init__(self) -> None:
        for problem in filter(None, self.problems()):
            raise ValueError(problem)

    def problems(self) -> Iterator[str | None]:
        """A message for each invalid field, None for others."""
        for field, rule in _rules(type(self)):
            yield rule.problem(field.replace("_", "-"), getattr(self, field))


class PciDeviceSpec(Spec, frozen=True, kw_only=True):
    """A PCI device in it, with an address and a NUMA node; the defaults follow from the number of the device."""

    bdf: Annotated[str | None, Form(BDF, "0000:03:00.0")] = None
    numa_node: Annotated[int | None, Range(-1, MAX_NUMA_NODES - 1)] = None


@functools.cache
def _rules(described: type[Spec]) -> list[tuple[str, Range | Form]]:
    hints = get_type_hints(described, include_extras=True).items()
    return [(field, rule) for field, hint in hints for rule in getattr(hint, "__metadata__", ())]
