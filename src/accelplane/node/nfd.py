"""Node labels through node-feature-discovery's local source: a text file of `key=value` lines."""

import os
from collections.abc import Mapping

from accelplane.node import replaced

MAX_LABEL_VALUE = 63


class LabelFile:
    """One label file. It is replaced in one step, and only when the labels differ from what it holds."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, labels: Mapping[str, str]) -> bool:
        """Makes the file hold `labels`, or removes it when there are none; whether anything changed.

        Raises `OSError`.
        """
        if not labels:
            return self.remove()
        text = "".join(f"{key}={value}\n" for key, value in sorted(labels.items())).encode()
        if replaced.content(self.path, len(text)) == text:
            return False
        # NFD ignores names that start with a dot, so it never reads a half-written file.
        replaced.replace(self.path, text, prefix=".labels")
        return True

    def remove(self) -> bool:
        """Removes the file; whether it was there."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True


def split_value(text: str, limit: int = MAX_LABEL_VALUE, marker: str = "Z") -> list[str]:
    """Pieces of a label value that is too long, each ending in a letter or digit; later ones begin with `marker`.

    The last piece may end in anything. Raises `ValueError` when a piece would have no letter or digit to end in.
    """
    if limit <= len(marker):
        raise ValueError(f"label pieces of {limit} characters leave no room behind the marker {marker!a}")
    pieces: list[str] = []
    prefix, room, rest = "", limit, text
    while len(rest) > room:
        cut = room
        while cut and not (rest[cut - 1].isascii() and rest[cut - 1].isalnum()):
            cut -= 1
        if not cut:
            raise ValueError(f"label value {rest[:room]!a} has no letter or digit to be split after")
        pieces.append(prefix + rest[:cut])
        rest = rest[cut:]
        prefix, room = marker, limit - len(marker)
    return [*pieces, prefix + rest]


def joined_value(pieces: list[str], marker: str = "Z") -> str:
    """The value that `split_value` took apart. A piece without its marker is taken as it is."""
    return "".join(piece if index == 0 else piece.removeprefix(marker) for index, piece in enumerate(pieces))


def numbered(key: str, value: str) -> dict[str, str]:
    """The labels for a value of any length: `key`, `key2`, `key3`… Raises `ValueError` as `split_value` does."""
    return {key if index == 1 else f"{key}{index}": piece for index, piece in enumerate(split_value(value), start=1)}
