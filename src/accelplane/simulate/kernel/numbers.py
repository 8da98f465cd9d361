"""Parsing of written attributes as by the kernel's kstrto functions (lib/kstrtox.c)."""

import errno
from collections.abc import Collection
from functools import partial

from accelplane.simulate.kernel.model import oserror


def number(text: str, *, base: int = 0, least: int = 0, most: int = 2**64 - 1) -> int:
    """The number in the text; base 0 accepts the prefixes 0x and 0. Raises `OSError` EINVAL or ERANGE."""
    digits = text.removesuffix("\n").removeprefix("+")
    try:
        if not digits.isascii() or digits != digits.strip() or "_" in digits:
            raise ValueError
        octal = base == 0 and len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        value = int(digits, 8 if octal else base)
    except ValueError:
        raise oserror(errno.EINVAL) from None
    if value < 0 <= least:
        raise oserror(errno.EINVAL)
    if not least <= value <= most:
        raise oserror(errno.ERANGE)
    return value


decimal = partial(number, base=10)
signed_int = partial(number, base=10, least=-(2**31), most=2**31 - 1)
signed = partial(number, base=10, least=-(2**63), most=2**63 - 1)


def check_range(least: int, most: int, value: int) -> int:
    """Returns the value. Raises `OSError` EINVAL if it is out of range."""
    if not least <= value <= most:
        raise oserror(errno.EINVAL)
    return value


def check_word(words: Collection[str], text: str) -> str:
    """Returns the written word. Raises `OSError` EINVAL if it is none of `words`."""
    word = text.removesuffix("\n")
    if word not in words:
        raise oserror(errno.EINVAL)
    return word


def lowest_free(used: Collection[int]) -> int:
    """The lowest number from 0 that is not in `used`."""
    return next(index for index in range(len(used) + 1) if index not in used)


def boolean(text: str) -> bool:
    """The truth value in the text. Raises `OSError` EINVAL."""
    first, two = text[:1].lower(), text[:2].lower()
    if first in ("y", "t", "1") or two == "on":
        return True
    if first in ("n", "f", "0") or two == "of":
        return False
    raise oserror(errno.EINVAL)
