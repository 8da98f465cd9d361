"""Intel FPGA cards: names, what sysfs says, ioctls, bitstreams and their store, and what a container asks for.

The plugin, the admission, the OCI hook and the tool stand on it. The hook is started for every container of a region,
by a runtime that waits: nothing here imports more than the standard library and `accelplane.host`, and values are named
tuples.
"""

from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"


class FpgaError(Exception):
    """Something that an administrator can act on; the message is one line that says what was found and expected."""

    def __str__(self) -> str:
        # Whatever is in a file's name, which messages have as it is.
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(text: str, most: int = 80) -> str:
    """Foreign text, quoted for a message: short and on one line."""
    return ascii(text if len(text) <= most else f"{text[: most - 3]}...")
