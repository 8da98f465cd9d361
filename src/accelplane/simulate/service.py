"""The base of simulated sidecar services: a gRPC server on a socket that can be stopped and started again.

It uses the reference implementation of gRPC, as the real services do.
"""

import os
from typing import Any, Self

import grpc
import grpc.aio


class SimulatedService:
    """A service on `socket`. It serves from `start` to `stop` or as a context manager and can be started again."""

    def __init__(self, socket: str | os.PathLike[str]) -> None:
        self.socket = os.fspath(socket)
        self._server: grpc.aio.Server | None = None

    def handlers(self) -> tuple[str, dict[str, Any]]:
        """The full name of the service and a handler for each method."""
        raise NotImplementedError

    async def start(self) -> None:
        """Starts serving on the socket and creates its directory if necessary. Raises `RuntimeError` if it fails."""
        os.makedirs(os.path.dirname(self.socket) or ".", exist_ok=True)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(*self.handlers()),))
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Aborts all calls and removes the socket. Does nothing if not started."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
