"""Semantic versions of image tags.

    parse(tag)               the version of a tag; None when the tag is no semantic version
    is_below(tag, other)     whether both tags are versions, and the first is lower
    is_original(tag)         whether a tag is a version of the Go project, whose releases are 0.x

As in the Go operator, a tag may begin with `v` and have white space around it.
"""

import re

import msgspec

_NUMBER = r"(0|[1-9]\d*)"
_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_VERSION = re.compile(rf"\s*v?{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_IDENTIFIERS}))?(?:\+{_IDENTIFIERS})?\s*", re.ASCII)
_MAX_LENGTH = 256


class Version(msgspec.Struct, frozen=True, order=True):
    """A semantic version, ordered as semver.org defines: a pre-release is lower than its release."""

    numbers: tuple[int, int, int]
    released: bool
    pre_release: tuple[tuple[bool, int, str], ...] = ()


def parse(tag: str) -> Version | None:
    """The version of a tag; None when the tag is no semantic version."""
    found = _VERSION.fullmatch(tag) if len(tag) <= _MAX_LENGTH else None
    if found is None:
        return None
    major, minor, patch, pre_release = found.groups()
    parts = pre_release.split(".") if pre_release else []
    # Numeric identifiers are lower than others and compared as numbers.
    identifiers = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)
    return Version((int(major), int(minor), int(patch)), not parts, identifiers)


def is_below(tag: str, other: str) -> bool:
    """Whether both tags are versions, and the first is lower than the other."""
    found, desired = parse(tag), parse(other)
    return found is not None and desired is not None and found < desired


def is_original(tag: str) -> bool:
    """Whether a tag is a version of the Go project, whose releases are 0.x."""
    found = parse(tag)
    return found is not None and found.numbers[0] == 0
