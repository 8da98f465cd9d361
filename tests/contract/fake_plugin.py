"""A device plugin with configurable responses: delays, errors, invalid data, crashes."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb

Handler = Callable[[Any], Awaitable[Any] | Any]


class HandlerError(Exception):
    """Raised by a handler to fail the call with its text."""


def listing(*devices: str | tuple[str, str] | tuple[str, str, Sequence[int]]) -> pb.ListAndWatchResponse:
    """A list from ids, (id, health) or (id, health, NUMA nodes)."""
    response = pb.ListAndWatchResponse()
    for device in devices:
        key, health, nodes = (device, "Healthy", ()) if isinstance(device, str) else (*device, ())[:3]
        entry = response.devices.add(ID=key, health=health)
        if nodes:
            entry.topology.nodes.extend(pb.NUMANode(ID=node) for node in nodes)
    return response


class FakePlugin:
    """Serves `resource` at `<directory>/<endpoint>`; every request is recorded in `requests[<method>]`.

    Handlers given by method name answer in the place of the defaults: with a message, with bytes that are sent as they
    are, or by raising `Refusal`.
    """

    def __init__(
        self,
        kubelet_dir: str,
        resource: str = "example.com/gadget",
        endpoint: str = "gadget.sock",
        *,
        options: pb.DevicePluginOptions | None = None,
        devices: pb.ListAndWatchResponse | None = None,
        **handlers: Handler,
    ) -> None:
        self.resource = resource
        self.endpoint = endpoint
        self.directory = os.path.join(kubelet_dir, "device-plugins")
        self.path = os.path.join(self.directory, endpoint)
        self.options = options or pb.DevicePluginOptions()
        self.requests: dict[str, list[Any]] = {}
        self.streams = 0
        self._lists: list[pb.ListAndWatchResponse | bytes | None] = [devices or listing("a", "b", "c")]
        self._more = asyncio.Condition()
        self._handlers: Mapping[str, Handler] = {
            "GetDevicePluginOptions": lambda _: self.options,
            "GetPreferredAllocation": lambda _: pb.PreferredAllocationResponse(),
            "Allocate": self.answer,
            "PreStartContainer": lambda _: pb.PreStartContainerResponse(),
            **handlers,
        }
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()

    async def serve(self) -> None:
        os.makedirs(self.directory, exist_ok=True)
        self._server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
        self._server.add_generic_rpc_handlers((self._service(),))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    @property
    def serving(self) -> bool:
        return self._server is not None

    async def abort(self) -> None:
        """Ends immediately and aborts all streams."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def register(self, *, version: str = "v1beta1", resource: str = "", endpoint: str = "") -> None:
        """Registers; raises `grpc.aio.AioRpcError`."""
        request = pb.RegisterRequest(
            version=version,
            endpoint=endpoint or self.endpoint,
            resource_name=resource or self.resource,
            options=self.options,
        )
        target = f"unix:{self.directory}/kubelet.sock"
        async with grpc.aio.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            await channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )(request, timeout=20)

    async def send(self, devices: pb.ListAndWatchResponse | bytes | None) -> None:
        """Sends one more list on the open streams; None ends them."""
        async with self._more:
            self._lists.append(devices)
            self._more.notify_all()

    def answer(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        """One device node and one variable for each id."""
        response = pb.AllocateResponse()
        for container in request.container_requests:
            one = response.container_responses.add()
            for key in container.devices_ids:
                one.devices.add(host_path=f"/dev/{key}", container_path=f"/dev/{key}", permissions="rw")
                one.envs[f"HAS_{key}"] = "yes"
        return response

    def ids(self, method: str) -> list[list[str]]:
        """The ids of each Allocate or PreStartContainer, sorted."""
        if method == "Allocate":
            return [sorted(request.container_requests[0].devices_ids) for request in self.requests.get(method, [])]
        return [sorted(request.devices_ids) for request in self.requests.get(method, [])]

    async def _list_and_watch(self, _request: pb.Empty, _context: object) -> AsyncIterator[Any]:
        self.streams += 1
        # A new stream starts with the latest list, as in a plugin.
        position = len(self._lists) - 1
        while True:
            async with self._more:
                while position >= len(self._lists):
                    await self._more.wait()
            devices = self._lists[position]
            position += 1
            if devices is None:
                return
            yield devices

    def _service(self) -> grpc.GenericRpcHandler:
        requests: Mapping[str, Any] = {
            "GetDevicePluginOptions": pb.Empty,
            "GetPreferredAllocation": pb.PreferredAllocationRequest,
            "Allocate": pb.AllocateRequest,
            "PreStartContainer": pb.PreStartContainerRequest,
        }
        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, request_deserializer=pb.Empty.FromString, response_serializer=_serialized
                ),
                **{method: self._unary(method, request_type) for method, request_type in requests.items()},
            },
        )

    def _unary(self, method: str, request_type: Any) -> Any:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self.requests.setdefault(method, []).append(request)
            try:
                answer = self._handlers[method](request)
                return await answer if isinstance(answer, Awaitable) else answer
            except HandlerError as error:
                await context.abort(grpc.StatusCode.UNKNOWN, str(error))

        return grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=request_type.FromString, response_serializer=_serialized
        )


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
