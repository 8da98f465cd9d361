"""Quantities as Kubernetes writes them (`512Ki`, `1.5`, `3e2`), exactly: apimachinery's `resource.Quantity`.

A value beyond 2^63-1 is that number, and one finer than a billionth is rounded away from zero, as there.
"""

import functools
import re
from fractions import Fraction
from typing import Final

Quantity = str | int | float

_NUMBER = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?", re.ASCII)
_MAX_TEXT = 128
_GREATEST: Final = Fraction(2**63 - 1)
_FINEST: Final = Fraction(1, 10**9)
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_SUFFIXES = {suffix: Fraction(1024) ** power for power, suffix in enumerate(_BINARY)} | {
    suffix: Fraction(10) ** power for suffix, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
}


class QuantityError(Exception):
    """A text that is no quantity."""


@functools.lru_cache(maxsize=1024)  # pods are made from templates: the same few texts come again and again
def parse(quantity: Quantity) -> Fraction:
    """The number that a quantity stands for. Raises `QuantityError`."""
    if isinstance(quantity, int):
        return _fitting(Fraction(quantity))
    text = quantity if isinstance(quantity, str) else repr(quantity)
    found = _NUMBER.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if found is None:
        raise QuantityError(f"{text[:40]!a} is not a quantity")
    sign, digits, suffix = found[1], found[2], found[3] or ""
    number = Fraction(digits)
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        # All beyond these is too great or too fine for any mantissa that fits into the text.
        number *= Fraction(10) ** max(-2 * _MAX_TEXT, min(2 * _MAX_TEXT, int(suffix[1:])))
    else:
        number *= _SUFFIXES[suffix]
    return _fitting(-number if sign == "-" else number)


def number_of(quantity: Quantity) -> Fraction | None:
    """Parses a quantity; returns None for an invalid one."""
    try:
        return parse(quantity)
    except QuantityError:
        return None


def binary_text(number: int) -> str:
    """The canonical text of a number of bytes, with the largest binary suffix that leaves an integer."""
    if number < 0:
        return f"-{binary_text(-number)}"
    if number < 1024:
        return "1k" if number == 1000 else str(number)
    power = 0
    while power < len(_BINARY) - 1 and number % 1024 == 0:
        number //= 1024
        power += 1
    return f"{number}{_BINARY[power]}"


def _fitting(number: Fraction) -> Fraction:
    magnitude = min(abs(number), _GREATEST)
    if (magnitude / _FINEST).denominator != 1:
        magnitude = -(-magnitude // _FINEST) * _FINEST
    return -magnitude if number < 0 else magnitude
