"""The two sockets of a DRA driver: the registration socket and the service socket.

The kubelet's root directory has `plugins_registry/<driver>-reg.sock` and `plugins/<driver>/dra.sock`. With an instance,
the UID of the pod, the names are `<driver>-<instance>-reg.sock` and `dra-<instance>.sock`, so that two instances of a
driver can serve at once. Names that are too long have a hash instead, as in Kubernetes' Go helper.

A socket is bound under a name with a dot, which the kubelet ignores, and renamed: its name always accepts connections.
"""

import contextlib
import hashlib
import os
import re
import secrets
import socket

from msgspec import Struct

from accelplane import rpc
from accelplane.kubelet import sockets

REGISTRY, PLUGINS = "plugins_registry", "plugins"
_HASH_DIGITS = 16
_TEMPORARY_BYTES = 3
# The UID of a pod, or a hash of it.
_INSTANCE = r"(-[0-9a-f][0-9a-f-]{7,63})?"
# The kubelet dials the endpoint as a URL.
_URL_CHARACTERS = frozenset("%?#")


class DriverPaths(Struct, frozen=True):
    """The paths of one instance: its sockets, and the directories that contain them."""

    registry: str
    registration: str
    directory: str
    service: str


def driver_paths(driver: str, kubelet_dir: str, instance: str) -> DriverPaths:
    """The paths of an instance, "" for the only one. Raises `sockets.SocketPathError`."""
    root = os.path.abspath(kubelet_dir)
    registry, directory = os.path.join(root, REGISTRY), os.path.join(root, PLUGINS, driver)
    hashed = hashlib.sha256(f"{driver}/{instance}".encode()).hexdigest()[:_HASH_DIGITS]
    names = (f"{driver}-{instance}-reg.sock", f"{driver}-{hashed}-reg.sock", f"dra-{hashed}-reg.sock")
    services = (f"dra-{instance}.sock", f"dra-{hashed}.sock")
    if not instance:
        names, services = (f"{driver}-reg.sock",), ("dra.sock",)
    service = _first_short(directory, services)
    if found := sorted(_URL_CHARACTERS & set(service)):
        raise sockets.SocketPathError(
            f"{service}: found {found[0]!r}, which the kubelet does not accept in a socket "
            "path; use another --kubelet-dir"
        )
    return DriverPaths(registry, _first_short(registry, names), directory, service)


def _first_short(directory: str, names: tuple[str, ...]) -> str:
    # A temporary name is shorter than each of the names.
    paths = [os.path.join(directory, name) for name in names]
    for path in paths:
        if len(os.fsencode(path)) <= sockets.MAX_PATH_BYTES:
            return path
    raise sockets.SocketPathError(
        f"{paths[-1]}: a socket path of {len(os.fsencode(paths[-1]))} bytes, at most {sockets.MAX_PATH_BYTES} are "
        "possible; use a shorter --kubelet-dir"
    )


class DriverSocket:
    """A socket of this process at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._identity: sockets.Identity | None = None

    @property
    def owned(self) -> bool:
        """Whether the file at `path` is this process's socket."""
        return self._identity is not None and sockets.identity(self.path) == self._identity

    async def create(self, server: rpc.RpcServer) -> None:
        """Starts `server` at `path`, in place of the socket there. Raises `OSError`."""
        temporary = os.path.join(os.path.dirname(self.path), f".{secrets.token_hex(_TEMPORARY_BYTES)}")
        try:
            await server.start(temporary)
            os.chmod(temporary, 0o600)
            identity = sockets.identity(temporary)
            os.replace(temporary, self.path)
            self._identity = identity
        finally:
            _unlink(temporary)

    def remove(self) -> None:
        """Removes the socket, unless another process has replaced it."""
        if self.owned:
            _unlink(self.path)
        self._identity = None


def remove_stale(paths: DriverPaths, driver: str) -> None:
    """Removes the sockets of ended instances of this driver: those that refuse connections."""
    patterns = (
        (paths.registry, rf"{re.escape(driver)}{_INSTANCE}-reg\.sock"),
        (paths.directory, rf"dra{_INSTANCE}\.sock"),
    )
    for directory, pattern in patterns:
        for name in _names(directory):
            path = os.path.join(directory, name)
            if re.fullmatch(pattern, name) and path not in (paths.registration, paths.service) and _refuses(path):
                _unlink(path)


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _refuses(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
