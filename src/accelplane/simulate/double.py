"""What the stand-ins for services beside a plugin share: a gRPC server on a socket that comes and goes.

By gRPC's reference implementation, as the services that they stand in for.
"""

import os
from typing import Any, Self

import grpc
import grpc.aio


class Double:
    """A service on `socket`, from `start` to `stop` or as a context manager; it can be started again."""

    def __init__(self, socket: str | os.PathLike[str]) -> None:
        self.socket = os.fspath(socket)
        self._server: grpc.aio.Server | None = None

    def handlers(self) -> tuple[str, dict[str, Any]]:
        """The service's full name, and a handler for each of its methods."""
        raise NotImplementedError

    async def start(self) -> None:
        """Serves on the socket, whose directory is made when missing. Raises `RuntimeError` when that cannot be."""
        os.makedirs(os.path.dirname(self.socket) or ".", exist_ok=True)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(*self.handlers()),))
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Cuts every call off and removes the socket. Does nothing when not started."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
