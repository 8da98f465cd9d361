"""`accelplane-cdi-hook`: an OCI createContainer hook that creates symbolic links in a container's root file system.

    accelplane-cdi-hook create-symlinks --link ../card0::/dev/dri/by-path/pci-0000:03:00.0-card

CDI specs support device nodes and mounts but no links; a mounted link becomes its target, and the PCI address is lost.
The runtime runs the hook before the container's program, with the container's state on standard input (OCI runtime
specification, config.md#posix-platform-hooks and runtime.md#state).

The image is untrusted: `/dev` may be a link to anywhere. Paths are walked by component from an open descriptor of the
root, links are resolved as in the container, and nothing outside the root is accessed. Existing files are unchanged; an
equal link counts as success. Exit status: 0, 1 for a failure, 2 for an invalid command line. Imports only the standard
library, for a short start time.
"""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Sequence

from accelplane.descriptors import closing, read_limited

PROGRAM = "accelplane-cdi-hook"
USAGE = f"Usage: {PROGRAM} create-symlinks --link TARGET::LINKPATH …   (the container's OCI state on standard input)"

_STATE_LIMIT = 1024 * 1024
_CONFIG_LIMIT = 16 * 1024 * 1024
_MAX_LINKS = 40  # the kernel's limit (path_resolution(7))
_PATH_LIMIT = 4096

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STATE = "the container's state"

Json = dict[str, "Json"] | list["Json"] | str | float | None


class HookError(Exception):
    """A failure; the message names the file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "-help", "--help"} & {*words[:1]}:
        print(USAGE)
        return 0
    try:
        links = parse_links(words)
    except ValueError as error:
        print(f"{PROGRAM}: {error}\n{USAGE}", file=sys.stderr)
        return 2
    problems: list[str] = []
    try:
        with closing(open_root(0)) as root:
            for target, path in links:
                try:
                    make_link(root, target, path)
                except (HookError, OSError) as error:
                    problems.append(_message(error, path))
    except HookError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse_links(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Returns target and path of each link. Raises `ValueError`."""
    words = list(arguments)
    command = words.pop(0) if words else ""
    if command != "create-symlinks":
        raise ValueError(f"found the command {command[:80]!a}, expected create-symlinks")
    links: list[tuple[str, str]] = []
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word not in ("--link", "-link") or not (equals or words):
            raise ValueError(f"found {word[:80]!a}, expected --link TARGET::LINKPATH")
        target, separator, path = (value if equals else words.pop(0)).partition("::")
        if not separator or not target or not path.startswith("/"):
            raise ValueError(f"--link: found {f'{target[:80]}{separator}{path[:80]}'!a}, expected TARGET::/LINKPATH")
        if path.rpartition("/")[2] in ("", ".", "..") or max(len(target), len(path)) >= _PATH_LIMIT:
            raise ValueError(f"--link: found the path {path[:80]!a}, expected a path that ends in the name of the link")
        links.append((target, path))
    return links


def open_root(state: int) -> int:
    """Opens the root file system of the container whose state is read from `state`. Raises `HookError`."""
    bundle = _text(_object(_read_state(state), _STATE), "bundle") or "."
    path = os.path.join(bundle, _configured_root(os.path.join(bundle, "config.json")) or "rootfs")
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise HookError(f"root file system {_message(error, path)}") from None


def make_link(root: int, target: str, path: str) -> None:
    """Creates the link `path` to `target` below the directory `root`, with its parent directories.

    Raises `HookError` if another file exists, or `OSError`.
    """
    directory, _slash, name = path.rpartition("/")
    with closing(_walk(root, directory)) as parent:
        try:
            os.symlink(target, name, dir_fd=parent)
        except FileExistsError:
            found = _link(parent, name)
            if found != target:
                what = "a file that is not a link" if found is None else f"a link to {found[:200]}"
                raise HookError(f"{path}: found {what}, expected no file or a link to {target[:200]}") from None


def _walk(root: int, directory: str) -> int:
    """Opens `directory` as the container resolves it. Creates missing directories.

    `..` returns to the descriptor of the parent that was opened before: the kernel's `..` would leave the root if the
    directory is moved concurrently.
    """
    pending = directory.split("/")[::-1]
    way = [os.dup(root)]
    hops = 0
    try:
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if len(way) > 1:
                    os.close(way.pop())
                continue
            target = _link(way[-1], part)
            if target is None:
                way.append(_enter(way[-1], part))
                continue
            hops += 1
            if hops > _MAX_LINKS:
                raise HookError(f"{directory}: more than {_MAX_LINKS} symbolic links, possibly a loop")
            if target.startswith("/"):
                while len(way) > 1:
                    os.close(way.pop())
            pending.extend(target.split("/")[::-1])
        return way.pop()
    finally:
        for descriptor in way:
            os.close(descriptor)


def _enter(parent: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        return os.open(name, _DIRECTORY, dir_fd=parent)


def _link(parent: int, name: str) -> str | None:
    """Returns the target of the link `name`, None if it is not a link."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _configured_root(config: str) -> str:
    """Returns the path of the root file system in the bundle's configuration, empty without a configuration."""
    try:
        root = _object(read_limited(config, _CONFIG_LIMIT), config).get("root")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise HookError(_message(error, config)) from None
    if not isinstance(root, dict):
        raise HookError(f"{config}: found no object root, expected one with the path of the root file system")
    return _text(root, "path")


def _read_state(descriptor: int) -> bytes:
    try:
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_STATE_LIMIT + 1) or b""
    except OSError as error:
        raise HookError(_message(error, _STATE)) from None
    if len(data) > _STATE_LIMIT:
        raise HookError(f"{_STATE}: more than {_STATE_LIMIT} bytes")
    return data


def _object(data: bytes, what: str) -> dict[str, Json]:
    try:
        found: Json = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HookError(f"{what}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise HookError(f"{what}: not a JSON object")
    return found


def _text(found: dict[str, Json], key: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise HookError(f"{key} is {str(value)[:80]!a}, expected a string")
    return value


def _message(error: Exception, path: str) -> str:
    return f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
