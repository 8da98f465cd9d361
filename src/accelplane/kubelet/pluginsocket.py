"""The socket of one resource in the kubelet's device plugin directory: its names, and the process that owns them.

All names are hard links of one socket. The *resource name*, `<namespace>-<resource>.sock`, is the one that users and
other plugins know: the process whose socket has it serves the resource. A *registration name*,
`<namespace>-<resource>-<suffix>.sock`, is used for one call of Register only: kubelets since 1.37 identify a plugin by
resource and path, and can reject each later registration of a path that they still regard as connected (see
docs/kubelet-defects.md).

A socket is bound under a hidden name and renamed. A name therefore always accepts connections, no socket in use is
unlinked, and the mode is 0600 from the start.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator

from accelplane import rpc
from accelplane.kubelet import sockets

_SUFFIX_BYTES = 3
PROCESS_START = time.time()
_USUAL_NAME_BYTES = 48  # registration names of this length, without `.sock`, fit into each usual directory
# A kubelet that was stopped connects late to the name of an earlier registration.
_REGISTRATION_NAMES_KEPT = 3


class PluginSocket:
    """The socket that this process serves at `path`, or waits to serve."""

    def __init__(self, directory: str, name: str) -> None:
        """Raises `sockets.SocketPathError` if the path is too long."""
        self.path = sockets.checked_path(os.path.join(directory, name))
        self._directory = directory
        stem = name.removesuffix(".sock")
        # A long name is truncated to the length of the resource name, which the path of the kubelet's directory allows:
        # that path can be longer than the one that this process uses. The suffix alone makes a name unique.
        suffix = len(f"-{'0' * 2 * _SUFFIX_BYTES}")
        encoded = os.fsencode(stem)
        longest = sockets.MAX_PATH_BYTES - len(os.fsencode(os.path.join(directory, ".sock")))
        self._stem = os.fsdecode(encoded[: min(longest, max(len(encoded), _USUAL_NAME_BYTES)) - suffix])
        self._identity: sockets.Identity | None = None
        self._registration_names: list[str] = []

    @property
    def owned(self) -> bool:
        """Whether `path` is this process's socket: no other process has replaced it, and it has not been removed."""
        return self._identity is not None and sockets.identity(self.path) == self._identity

    def owner(self) -> int | None:
        """The ID of the process that listens at `path` (0 if unknown), None if there is none."""
        return sockets.listener(self.path)

    def can_be_taken_over(self) -> bool:
        """Whether the process at `path` stops serving when its socket is replaced, and has started before this one.

        Only sockets of this class have a second name. A socket older than this process is one of an earlier process.
        """
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        return status.st_nlink > 1 and status.st_mtime < PROCESS_START

    async def create(self, server: rpc.RpcServer) -> None:
        """Starts `server` at `path`, and removes the sockets of ended processes of this resource. Raises `OSError`."""
        temporary = os.path.join(self._directory, f".{secrets.token_hex(_SUFFIX_BYTES)}")
        try:
            await server.start(temporary)
            os.chmod(temporary, 0o600)
            identity = sockets.identity(temporary)
            os.replace(temporary, self.path)
            self._identity = identity
        finally:
            _unlink(temporary)
        for path in self._siblings():
            # Only this pattern's names: they are never used again, so a socket without a listener stays without one.
            if sockets.listener(path) is None:
                _unlink(path)

    def add_registration_name(self) -> str:
        """Returns a new name of the socket for one call of Register.

        Raises `OSError`, also if another process has replaced the socket.
        """
        name = f"{self._stem}-{secrets.token_hex(_SUFFIX_BYTES)}.sock"
        path = os.path.join(self._directory, name)
        os.link(self.path, path, follow_symlinks=False)
        if sockets.identity(path) != self._identity:
            _unlink(path)
            raise FileExistsError(errno.EEXIST, "the socket was replaced", self.path)
        self._registration_names.append(name)
        while len(self._registration_names) > _REGISTRATION_NAMES_KEPT:
            _unlink(os.path.join(self._directory, self._registration_names.pop(0)))
        return name

    def remove(self) -> None:
        """Removes the names of this process's socket."""
        for name in self._registration_names:
            _unlink(os.path.join(self._directory, name))
        self._registration_names.clear()
        if self.owned:
            _unlink(self.path)
        self._identity = None

    def _siblings(self) -> Iterator[str]:
        """The registration names of all processes for this resource."""
        pattern = re.compile(rf"{re.escape(self._stem)}-[0-9a-f]{{{2 * _SUFFIX_BYTES}}}\.sock")
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                if pattern.fullmatch(name) and name not in self._registration_names:
                    yield os.path.join(self._directory, name)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
