"""The files of profiles: where they are searched, and reading them within limits."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from accelplane.descriptors import read_limited
from accelplane.onload.profiles.errors import ProfileError, ProfileNotFound

# Onload's own profiles have less than 4 KiB.
MAX_SIZE = 64 * 1024
SYSTEM = "/usr/libexec/onload/profiles"


class Search(NamedTuple):
    """`home` is the home directory; `directories` are searched in order, after the user's own profiles."""

    home: str
    directories: tuple[str, ...]

    def candidates(self, name: str, *, fragments: bool) -> Iterator[str]:
        """The paths that a profile can have. The first file that exists counts."""
        suffixes = (".opf", ".opf-fragment") if fragments else (".opf",)
        for directory in (f"{self.home}/.openonload/profiles", *self.directories):
            for suffix in suffixes:
                yield f"{directory}/{name}{suffix}"
        yield name

    def find(self, name: str, *, fragments: bool) -> str:
        """The path of a profile. Raises `ProfileNotFound`."""
        paths = list(self.candidates(name, fragments=fragments))
        for path in paths:
            # A path with a NUL character is no file.
            if "\0" not in path and os.path.isfile(path):
                return path
        raise ProfileNotFound(f"profile {name!a}: not found; looked for {', '.join(paths)}")


def search(names: Sequence[str], *, home: str, program_directory: str) -> Search:
    """The search for the profiles of a command line.

    Profiles beside the program are those of Onload's source tree, which has an executable `mmaketool` there.
    """
    own = SYSTEM
    if program_directory and os.access(f"{program_directory}/mmaketool", os.X_OK):
        own = f"{program_directory}/onload_profiles"
    return Search(home, (own, *(os.path.dirname(name) or "." for name in names)))


def read(path: str) -> str:
    """The text of a file. Raises `ProfileError` if it is too large, no file or not UTF-8."""
    try:
        content = read_limited(path, MAX_SIZE)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}, expected a profile") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: byte {error.start} is not UTF-8, expected a text") from None
    if "\0" in text:
        raise ProfileError(f"{path}: found a NUL character, expected a text")
    return text
