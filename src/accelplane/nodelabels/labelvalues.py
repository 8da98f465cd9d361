"""Texts of any length as label values, which have at most 63 characters and end in a letter or a digit.

A longer text becomes several labels. Each part after the first begins with a mark, which is not part of the text: a
value must not begin with a separator of the text.
"""

import re
from collections.abc import Mapping

LENGTH = 63
MARK = "Z"

_TO_LAST_ALPHANUMERIC = re.compile(r".*[A-Za-z0-9]", re.DOTALL)


def split(text: str, length: int = LENGTH, mark: str = MARK) -> list[str]:
    """The parts of a text. Empty if a part would have no letter or digit, or no room beside the mark."""
    parts: list[str] = []
    while len(text) > length:
        cut = _TO_LAST_ALPHANUMERIC.match(text[:length])
        if cut is None or (parts and cut.end() <= len(mark)):
            return []
        parts.append(cut[0])
        text = mark + text[cut.end() :]
    return [*parts, text]


def number_labels(key: str, text: str) -> Mapping[str, str]:
    """The labels of a text: `key`, `key2`, `key3` and so on."""
    return {f"{key}{number if number > 1 else ''}": part for number, part in enumerate(split(text), 1)}
