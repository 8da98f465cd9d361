"""Configuration files of the desired state: one for all nodes, and one per node, which replaces it there.

They are in a directory of this process, usually a mounted ConfigMap, and not below the root that is provisioned. Errors
in them end the command before anything is written.
"""

import errno
import os

import msgspec

from accelplane.descriptors import read_limited

# A ConfigMap holds no more.
CONFIG_LIMIT = 1024 * 1024
_NODE_NAME_LIMIT = 253  # of a Kubernetes object


class ConfigError(Exception):
    """A configuration file, or the environment variable with the name in `file`, is invalid.

    `line` counts from 1; 0 for errors without a line.
    """

    def __init__(self, file: str, line: int, found: str, expected: str) -> None:
        shown_file = file if file.isprintable() else ascii(file)
        place = f"{shown_file}:{line}" if line else shown_file
        super().__init__(f"{place}: found {found}, expected {expected}")
        self.file = file
        self.line = line
        self.found = found
        self.expected = expected


class ConfigFile(msgspec.Struct, frozen=True):
    """The path and the text of a file."""

    path: str
    text: str


def find(config_dir: str, name: str, node_name: str) -> ConfigFile | None:
    """This node's file: `<name>-<node name>.conf`, else `<name>.conf`; None if neither exists.

    Raises `ConfigError` if it cannot be read.
    """
    if len(node_name) > _NODE_NAME_LIMIT or "/" in node_name or "\0" in node_name:
        raise ConfigError("NODE_NAME", 0, quote(node_name), "the name of a Kubernetes node")
    paths = [os.path.join(config_dir, f"{name}.conf")]
    if node_name:
        paths.insert(0, os.path.join(config_dir, f"{name}-{node_name}.conf"))
    for path in paths:
        if (file := read(path)) is not None:
            return file
    return None


def read(path: str) -> ConfigFile | None:
    """The configuration file, None if it does not exist. Raises `ConfigError`."""
    try:
        data = read_limited(path, CONFIG_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the node's name is almost as long as a file name may be
            return None
        raise ConfigError(path, 0, f"a file that cannot be read ({error.strerror})", "a text file") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            path, line, f"bytes that are no text ({data[error.start : error.start + 8].hex(' ')})", "UTF-8"
        ) from None
    if text.startswith("\ufeff"):
        raise ConfigError(path, 1, "a byte order mark", "UTF-8 without one")
    return ConfigFile(path, text)


def quote(text: str) -> str:
    """The text quoted for messages: short and printable."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}…")
