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
    if length <= len(mark):
        return []
    parts: list[str] = []
    prefix = ""
    while len(text) > length:
        # The first part has no mark, all others have room for it.
        cut = _TO_LAST_ALPHANUMERIC.match(text[:length])
        if cut is None:
            return []
        parts.append(prefix + cut[0])
        text = text[cut.end() :]
        if not prefix:
            prefix = mark
            length -= len(mark)
    parts.append(prefix + text)
    return parts


def numbered(key: str, text: str) -> Mapping[str, str]:
    """The labels of a text: `key`, `key2`, `key3` and so on."""
    return {f"{key}{number if number > 1 else ''}": part for number, part in enumerate(split(text), 1)}
