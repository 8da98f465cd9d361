"""Unix sockets of the kubelet and of plugins: length limits, identity, and who listens."""

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
    """A path on which no socket can be made, whatever happens: too long, or below something that is no directory."""


class Identity(NamedTuple):
    """Tells a socket from a later one of the same name. The time guards against inode numbers used again."""

    device: int
    inode: int
    modified: int


def checked_path(path: str) -> str:
    """`path`, if a socket address can hold it. Raises `SocketPathError`."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise SocketPathError(
            f"{path}: a socket path of {length} bytes, at most {MAX_PATH_BYTES} are possible; "
            "use a shorter --kubelet-dir or resource name"
        )
    return path


def identity(path: str) -> Identity | None:
    """Of the file at `path`, None when there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino, status.st_mtime_ns)


def listener(path: str) -> int | None:
    """The process id of who listens on the socket at `path` (0 when it is in another pid namespace), None if nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return 0  # alive, its queue of connections is full
        except OSError:
            return None
        pid, _uid, _gid = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid


def address(path: str) -> str:
    """The gRPC target or listening address of an absolute socket path, as the reference implementation spells it."""
    return f"unix://{quote(path)}"
