"""Options that several families share: their types with the help texts, and the checks on them."""

import os.path
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

Prefix = Annotated[
    str, Meta(description="put in front of the sysfs and devfs paths, also of those told to the kubelet")
]
SharedDevNum = Annotated[int, Meta(description="number of containers that may share one device")]
AllocationPolicy = Annotated[
    str,
    Meta(
        description="which devices a container gets: none (the least used ones), balanced (those with most available "
        "shares) or packed (as few as possible)"
    ),
]
CdiMode = Annotated[
    str,
    Meta(
        description="what goes through CDI: auto (what always did), all (every device, besides the classic answer), "
        "only (every device, nothing classic) or off"
    ),
]


def normal_prefix(prefix: str) -> str:
    """The prefix as paths can be appended to it: no trailing slash, empty for the root itself.

    Raises `ValueError` when it is not absolute: the kubelet takes no other paths.
    """
    if not prefix:
        return ""
    if not prefix.startswith("/"):
        raise ValueError(f"prefix {prefix!a} must be an absolute path")
    return "/" + os.path.normpath(prefix).lstrip("/") if prefix.strip("/") else ""


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raises `ValueError` if the value is none of the choices. The text begins as that of the Go implementation."""
    if value not in choices:
        raise ValueError(f"invalid value for {option}, valid values: {', '.join(choices)}; found {value!a}")
