"""Facts of the source tree from git."""

import subprocess
from pathlib import Path

from release.errors import ReleaseError


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise ReleaseError("git: not found, expected in PATH; install it to make releases") from error
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}; run it in a clone of the repository")
    return done.stdout.strip()


def commit_time(root: Path) -> int:
    """The time of the last commit in seconds."""
    return int(_git(root, "log", "-1", "--format=%ct"))


def commit(root: Path) -> str:
    """The hash of the last commit."""
    return _git(root, "rev-parse", "HEAD")


def changes(root: Path, *whole: str) -> list[str]:
    """The files that differ from the last commit, and those that git does not know.

    The directories `whole` get into releases as they are: files that git ignores are changes too, except what Python
    writes.
    """
    found = _git(root, "status", "--porcelain").splitlines()
    ignored = _git(root, "ls-files", "--others", "--ignored", "--exclude-standard", "--", *whole).splitlines()
    return found + [f"!! {name}" for name in ignored if not _of_python(name)]


def _of_python(name: str) -> bool:
    return any(part == "__pycache__" or part.endswith(".egg-info") for part in name.split("/"))


def origin(root: Path) -> str:
    """The address of the repository without credentials; empty if it has none."""
    try:
        address = _git(root, "remote", "get-url", "origin")
    except ReleaseError:
        return ""
    scheme, separator, rest = address.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else ""
