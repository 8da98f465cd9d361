"""Numbers in the text of attributes, as samples of metric families.

"No reading" is never 0: a text that is no number, or that is the value of a register that cannot be read, raises
`InvalidText`.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct

# At most 20 digits: the largest 64-bit number has 20.
_NUMBER = re.compile(r"[+-]?(?:0x[0-9a-fA-F]{1,16}|[0-9]{1,20})", re.ASCII)
# What registers of 32 and 64 bits return if the device does not answer: all bits are one.
_NOT_READ = {-1, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF}
_LABEL_TEXT = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_LABEL_BYTES = 128
NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}  # as the text format writes these numbers
# One invalid name would make the whole page invalid.
METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_KINDS = ("counter", "gauge")


class Family(Struct, frozen=True):
    """A metric family. `name` is complete, with `_total` for counters. Raises `ValueError` for an invalid one."""

    name: str
    help: str
    kind: Literal["counter", "gauge"] = "gauge"

    def __post_init__(self) -> None:
        if not METRIC_NAME.fullmatch(self.name):
            raise ValueError(f"metric name {self.name!a}: expected letters, digits, _ and :, and no digit first")
        if self.kind not in _KINDS:
            raise ValueError(f"metric {self.name}: found kind {self.kind!a}, expected {' or '.join(_KINDS)}")


class Value(NamedTuple):
    """One sample. `labels` are the labels beside those of the device, as `labels` renders them."""

    family: Family
    labels: str
    value: float


class InvalidText(ValueError):
    """The text has no value, or not only values. `values` are the valid ones."""

    def __init__(self, text: str, values: Sequence[Value] = ()) -> None:
        super().__init__(f"found {text[:40]!a}")
        self.values = values


Parse = Callable[[str], Sequence[Value]]


@lru_cache(maxsize=1024)
def labels(**texts: str) -> str:
    """Renders labels in the given order, for example `sensor="card",limit="burst"`.

    Raises `ValueError` if a name is invalid.
    """
    for name in texts:
        if not LABEL_NAME.fullmatch(name):
            raise ValueError(f"label {name!a}: expected letters, digits and _")
    return ",".join(f'{name}="{escape(text)}"' for name, text in texts.items())


@lru_cache(maxsize=4096)
def escape(text: str) -> str:
    """The text of a label: at most 128 bytes, without control characters, escaped as the text format says."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    shortened = clean.encode(errors="replace")[:_LABEL_BYTES].decode(errors="ignore")
    return shortened.translate(_LABEL_TEXT)


def number(text: str) -> int:
    """The decimal or hexadecimal number. Raises `InvalidText`, also for the value of a register that was not read."""
    stripped = text.strip(" \t\n\0")
    if not _NUMBER.fullmatch(stripped):
        raise InvalidText(text)
    value = int(stripped, 16 if "x" in stripped else 10)
    if value in _NOT_READ:
        raise InvalidText(text)
    return value


@lru_cache(maxsize=512)  # the devices of a node share their parsers
def scalar(
    family: Family, *, scale: float = 1.0, extra: str = "", lowest: float = 0.0, highest: float = math.inf
) -> Parse:
    """A parser of one number: `scale` converts it to the unit of the family, in which the limits are."""
    # 45500 * 1e-3 has a rounding error that 45500 / 1000 does not have.
    divisor = round(1 / scale) if scale < 1 else 0

    def parse(text: str) -> Sequence[Value]:
        value = number(text) / divisor if divisor else number(text) * scale
        if not lowest <= value <= highest:
            raise InvalidText(text)
        return (Value(family, extra, value),)

    return parse


def flag(family: Family, true: str, extra: str = "") -> Parse:
    """A parser of a word: 1 for `true`, 0 for other words."""

    def parse(text: str) -> Sequence[Value]:
        word = text.strip()
        if not word.isascii() or not word.isprintable() or not word:
            raise InvalidText(text)
        return (Value(family, extra, float(word == true)),)

    return parse


def parse_parts(text: str, parts: Iterable[Callable[[], Sequence[Value]]]) -> Sequence[Value]:
    """The values of all parts. Raises `InvalidText` with the valid values if a part raises it."""
    values: list[Value] = []
    invalid = False
    for part in parts:
        try:
            values += part()
        except InvalidText as error:
            values += error.values
            invalid = True
    if invalid:
        raise InvalidText(text, values)
    return values
