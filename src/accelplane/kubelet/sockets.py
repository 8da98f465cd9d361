"""Unix sockets of the kubelet and of plugins: length limits, identity, and listening processes."""

import os
import socket
import struct
from typing import NamedTuple
from urllib.parse import quote

# sun_path has 108 bytes with the final zero (unix(7)).
MAX_PATH_BYTES = 107

# Python peers would otherwise send the percent-encoded path as the authority.
CHANNEL_OPTIONS = (("grpc.default_authority", "localhost"), ("grpc.enable_http_proxy", 0))


class SocketPathError(ValueError):
    """A path at which no socket can be created: too long, or below a file that is not a directory."""


class Identity(NamedTuple):
    """Differs between a socket and a later one of the same name. The time distinguishes reused inode numbers."""

    device: int
    inode: int
    modified: int


def checked_path(path: str) -> str:
    """Returns `path` if it fits into a socket address. Raises `SocketPathError`."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise SocketPathError(
            f"{path}: a socket path of {length} bytes, at most {MAX_PATH_BYTES} are possible; "
            "use a shorter --kubelet-dir or resource name"
        )
    return path


def identity(path: str) -> Identity | None:
    """The identity of the file at `path`, None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino, status.st_mtime_ns)


def listener(path: str) -> int | None:
    """The ID of the process that listens at `path` (0 if it is in another PID namespace), None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0  # in use, its backlog is full
        except OSError:
            return None
        pid, _uid, _gid = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid


def address(path: str) -> str:
    """The address of an absolute socket path in the reference implementation of gRPC."""
    return f"unix://{quote(path)}"
