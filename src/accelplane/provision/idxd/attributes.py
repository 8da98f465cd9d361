"""The attributes of DSA and IAA devices, groups, work queues and engines: their types and limits.

Facts: the kernel's Documentation/ABI/stable/sysfs-driver-dma-idxd, and when its idxd driver accepts a write.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from accelplane.provision.idxd.jsonc import Plain

Kind: TypeAlias = Literal["device", "group", "wq", "engine"]
KINDS: tuple[Kind, ...] = ("device", "group", "wq", "engine")


class Part(NamedTuple):
    """A device itself, or one of its groups, work queues or engines by its number."""

    kind: Kind
    number: int = 0

    def needs_device_disabled(self, attribute: str) -> bool:
        """Whether the device must be disabled for the attribute to be written; else its queue must be."""
        return self.kind != "wq" or attribute in _NEEDS_DEVICE_DISABLED


DEVICE = Part("device")


class Number(NamedTuple):
    """An integer within limits. `rounded`: the kernel rounds it up to a power of two."""

    least: int = 0
    most: int = 2**63 - 1
    rounded: bool = False

    def text(self, plain: Plain) -> str | None:
        """The text for the attribute, None if it is invalid. Quoted numbers, true and false are numbers too."""
        if isinstance(plain, str) and re.fullmatch(r"-?[0-9]{1,20}", plain, re.ASCII):
            plain = int(plain)
        return str(int(plain)) if isinstance(plain, int) and self.least <= plain <= self.most else None

    def is_equal(self, desired: str, found: str) -> bool:
        try:
            return self.stored_number(int(desired)) == int(found, 0)
        except ValueError:
            return False

    def stored_number(self, value: int) -> int:
        """The value that the kernel stores."""
        return 1 << (value - 1).bit_length() if self.rounded and value > 0 else value

    def __str__(self) -> str:
        return f"a whole number from {self.least}" + (f" to {self.most}" if self.most < 2**63 - 1 else "")


class Word(NamedTuple):
    """A text that matches a pattern. Texts with the same `value`, which raises `ValueError`, are the same."""

    form: str
    expected: str
    value: Callable[[str], object] = str

    def text(self, plain: Plain) -> str | None:
        return plain if isinstance(plain, str) and re.fullmatch(self.form, plain) else None

    def is_equal(self, desired: str, found: str) -> bool:
        try:
            return self.value(desired) == self.value(found)
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.expected


def _bits(text: str) -> int:
    """The bitmap in the kernel's format: words of 32 bits in hexadecimal, separated by commas."""
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | int(word, 16)
    return bits


Rule: TypeAlias = Number | Word

_FLAG = Number(0, 1)

# In the order of the writes to a queue: the size limits the threshold, a dedicated queue has none, a queue whose
# type changes loses its name, and faults can only be waited for with page requests.
RULES: Mapping[Kind, Mapping[str, Rule]] = {
    "device": {"read_buffer_limit": Number(), "event_log_size": Number()},
    "group": {
        "read_buffers_reserved": Number(),
        "read_buffers_allowed": Number(),
        "use_read_buffer_limit": _FLAG,
        "traffic_class_a": Number(0, 7),
        "traffic_class_b": Number(0, 7),
        "desc_progress_limit": Number(0, 3),
        "batch_progress_limit": Number(0, 3),
    },
    "wq": {
        "group_id": Number(),
        "size": Number(1),
        "mode": Word("dedicated|shared", "dedicated or shared"),
        "type": Word("user|kernel", "user or kernel"),
        "name": Word(r"[!-~]([ -~]{0,126}[!-~])?", "up to 128 printable ASCII characters, no blanks around them"),
        "driver_name": Word(r"[A-Za-z0-9_-]{1,127}", "the name of a driver"),
        "priority": Number(1, 15),
        "prs_disable": _FLAG,
        "ats_disable": _FLAG,
        "block_on_fault": _FLAG,
        "max_batch_size": Number(1, rounded=True),
        "max_transfer_size": Number(1, rounded=True),
        "op_config": Word(
            r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8}){0,7}", "up to 8 hexadecimal words with commas between them", _bits
        ),
        "threshold": Number(),
    },
    "engine": {"group_id": Number()},
}
# Deprecated names, which newer kernels still have as files.
ALIASES = {
    "token_limit": "read_buffer_limit",
    "tokens_reserved": "read_buffers_reserved",
    "tokens_allowed": "read_buffers_allowed",
    "use_token_limit": "use_read_buffer_limit",
}
READ_BUFFERS = frozenset(ALIASES.values())

# The driver of the queues of a type without `driver_name`.
DRIVERS = {"user": "user", "kernel": "dmaengine"}
# The types of the queues that the kernel's drivers accept. Drivers of others may accept any.
TYPES = {"user": "user", "dmaengine": "kernel", "crypto": "kernel"}

# The writable attributes of a disabled queue of an enabled device.
_NEEDS_DEVICE_DISABLED = frozenset(("size", "group_id"))
# The writable attributes of a device whose configuration is read-only (`configurable` is 0).
NEVER_FIXED = frozenset(("type", "name", "driver_name"))
# Attributes that older kernels and some hardware do not have.
OPTIONAL = frozenset(
    (
        "event_log_size",
        "desc_progress_limit",
        "batch_progress_limit",
        "driver_name",
        "max_batch_size",
        "ats_disable",
        "prs_disable",
        "op_config",
    )
)


def is_equal(part: Part, attribute: str, desired: str, found: str) -> bool:
    """Whether the attribute reads as it does once `desired` was written to it."""
    return RULES[part.kind][attribute].is_equal(desired, found)


def stored_number(part: Part, attribute: str, text: str) -> int:
    """The number that the kernel stores for the text."""
    rule = RULES[part.kind][attribute]
    return rule.stored_number(int(text)) if isinstance(rule, Number) else int(text)
