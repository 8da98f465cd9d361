"""Kubernetes' quantities (`40m`, `1.5Gi`, `2e3`) as numbers, to compare them by what they mean."""

import re
from decimal import Decimal

_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40}))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII
)
_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SCALES = _BINARY | {letter: Decimal(1).scaleb(power) for letter, power in _DECIMAL.items()}


def quantity(value: str | int) -> Decimal | None:
    """The number that a quantity stands for; None when it is none."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        return None
    number, suffix, exponent = found.groups()
    if exponent:
        return Decimal(number).scaleb(int(exponent))
    return Decimal(number) * _SCALES[suffix] if suffix else Decimal(number)
