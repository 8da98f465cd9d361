"""Options that several families share: types with help texts, and checks."""

import os.path
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

Prefix = Annotated[str, Meta(description="prefix of the sysfs and devfs paths, also in the Allocate response")]
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
        description="which devices are given by CDI: auto (as the Go implementation), all (also by the rest of the "
        "Allocate response), only (not by the rest of the response) or off"
    ),
]


def normal_prefix(prefix: str) -> str:
    """Returns the prefix without a trailing slash; the root is an empty text.

    Raises `ValueError` if it is not absolute: the kubelet needs absolute paths.
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
