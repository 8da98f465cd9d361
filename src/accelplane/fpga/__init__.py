"""Intel FPGA cards: ids and names, sysfs, ioctls, bitstreams and their store, and requests of containers.

The plugin, the admission webhook, the OCI hook and the tool use it. The container runtime waits for the hook, so
modules import only the standard library and `accelplane.host`, and values are named tuples.
"""

from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"


class FpgaError(Exception):
    """An error for administrators; the message is one line with the found and the expected value."""

    def __str__(self) -> str:
        # A message may contain a file name with control characters.
        text = super().__str__()
        return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quote(text: str, most: int = 80) -> str:
    """Quotes untrusted text for a message, truncated and on one line."""
    return ascii(text if len(text) <= most else f"{text[: most - 3]}...")
