"""The Unix socket by which commands on the same node read the agent's status, without a flag and without rights.

It is below the kubelet's directory for device plugins, which all agents have and which is shared with the node: the
kubelet keeps directories there when it removes the sockets of plugins. Only root can enter the directory. Agents of
different programs have sockets of their own. Of two agents of one program, the first serves until it ends.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable

from accelplane.kubelet import sockets
from accelplane.kubelet.notifier import Notifier
from accelplane.node.settings import Settings
from accelplane.node.watcher import Watcher

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"

# Where another agent serves, which may be killed without removing its socket, or where changes cause no events.
_CHECK_INTERVAL = 10.0
_TIMEOUT = 10.0
_MAX_CLIENTS = 8


def directory(settings: Settings) -> str:
    """The directory of the sockets of all agents of the node."""
    return f"{settings.sockets_dir}/accelplane"


async def serve(settings: Settings, program: str, document: Callable[[], Awaitable[bytes]], watcher: Watcher) -> None:
    """Sends `document()` to each client until cancelled. Without a usable path the agent runs on, and logs why."""
    is_automatic = settings.status_socket == AUTO
    path = f"{directory(settings)}/{program}.sock" if is_automatic else settings.status_socket
    wake = Notifier()
    watcher.directories("status socket", (os.path.dirname(path),), wake.notify_all)
    try:
        await _StatusSocket(path, document).run(
            wake, lambda: settings.safety_interval if watcher.complete else _CHECK_INTERVAL
        )
    finally:
        watcher.forget("status socket")


class _StatusSocket:
    def __init__(self, path: str, document: Callable[[], Awaitable[bytes]]) -> None:
        self._path = path
        self._document = document
        self._clients: set[asyncio.Task[None] | None] = set()
        self._problem = ""

    async def run(self, wake: Notifier, interval: Callable[[], float]) -> None:
        """Serves at the path, and creates the socket again if it was removed, until cancelled.

        `wake` notifies of changes in the socket's directory, `interval` has the seconds between checks while it serves.
        """
        server: asyncio.Server | None = None
        identity: sockets.Identity | None = None
        try:
            while True:
                count = wake.count
                if identity is None or sockets.identity(self._path) != identity:
                    if server is not None:
                        server.close()
                    server, identity = await self._start()
                if wake.count == count:
                    await wake.wait(_CHECK_INTERVAL if server is None else interval())
        finally:
            if server is not None:
                server.close()
            for client in self._clients:
                if client is not None:
                    client.cancel()
            if identity is not None and sockets.identity(self._path) == identity:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)

    async def _start(self) -> tuple[asyncio.Server | None, sockets.Identity | None]:
        """A server and the identity of its socket; None if another agent serves there, or if there is no directory."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(self._path), 0o700)
            if sockets.listener(sockets.checked_path(self._path)) is not None:
                return None, None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            server = await asyncio.start_unix_server(self._serve, self._path)
            os.chmod(self._path, 0o600)
        except (OSError, ValueError) as error:
            problem = str(error)
            # The kubelet creates its directory at its first start.
            if problem != self._problem and not isinstance(error, FileNotFoundError):
                log.warning(
                    "status socket: %s; `accelplane inspect` and `top` cannot show the health of devices", error
                )
            self._problem = problem
            return None, None
        self._problem = ""
        return server, sockets.identity(self._path)

    async def _serve(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        try:
            if len(self._clients) < _MAX_CLIENTS:
                self._clients.add(task)
                async with asyncio.timeout(_TIMEOUT):
                    writer.write(await self._document())
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client reads an incomplete document, and reports it
        finally:
            self._clients.discard(task)
            writer.close()
