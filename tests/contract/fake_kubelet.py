"""The Registration service of a misbehaving kubelet."""

import asyncio
import contextlib
import os
from typing import Self

import grpc
import grpc.aio
from peer import Peer

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb


class FakeKubelet:
    """Accepts registrations, or rejects them with `refusal`; opens a stream only for resources in `watches`.

    With `cuts` it ends every stream after its first list.
    """

    def __init__(self, directory: str, *, refusal: str = "", watches: bool = False, cuts: bool = False) -> None:
        self.plugins = os.path.join(directory, "device-plugins")
        self.path = os.path.join(self.plugins, "kubelet.sock")
        self.refusal = refusal
        self.watches = watches
        self.cuts = cuts
        self.registered: list[str] = []
        self.lists: list[list[str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        os.makedirs(self.plugins, exist_ok=True)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self._service(),))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def stop(self) -> None:
        """Ends the streams and the service."""
        self.end_streams()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def end_streams(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _service(self) -> grpc.GenericRpcHandler:
        async def register(
            request: pb.RegisterRequest, context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.Empty]
        ) -> pb.Empty:
            self.registered.append(request.resource_name)
            if self.refusal:
                await context.abort(grpc.StatusCode.UNKNOWN, self.refusal)
            if self.watches:
                task = asyncio.create_task(self._watch(request.endpoint))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            return pb.Empty()

        return grpc.method_handlers_generic_handler(
            "v1beta1.Registration",
            {
                "Register": grpc.unary_unary_rpc_method_handler(
                    register,
                    request_deserializer=pb.RegisterRequest.FromString,
                    response_serializer=pb.Empty.SerializeToString,
                )
            },
        )

    async def _watch(self, endpoint: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with Peer(os.path.join(self.plugins, endpoint)) as plugin, plugin.watch() as lists:
                while (devices := await lists.next()) is not None:
                    self.lists.append(list(devices))
                    if self.cuts:
                        return
