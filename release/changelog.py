"""The changelog: the section of a version, and the version before it."""

import re

from release.errors import ReleaseError

_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (.+))?$", re.MULTILINE)


def section(text: str, version: str) -> str:
    """The text of a version without its heading. Raises `ReleaseError` if there is none or it is empty."""
    headings = list(_HEADING.finditer(text))
    for position, heading in enumerate(headings):
        if heading[1] == version:
            end = headings[position + 1].start() if position + 1 < len(headings) else len(text)
            if body := text[heading.end() : end].strip():
                return f"{body}\n"
            break
    raise ReleaseError(f"CHANGELOG.md: found no text below ## [{version}]; describe the changes of the version there")


def previous(text: str, version: str) -> str:
    """The released version before another one; empty if there is none. Unreleased versions are left out."""
    names = [heading[1] for heading in _HEADING.finditer(text) if "unreleased" not in (heading[2] or "").lower()]
    if version in names:
        names = names[names.index(version) + 1 :]
    return next((name for name in names if name.lower() != "unreleased" and name != version), "")


def is_dated(text: str, version: str) -> bool:
    """Whether the heading of a version has a date."""
    return any(
        heading[1] == version and re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2] or "")
        for heading in _HEADING.finditer(text)
    )
