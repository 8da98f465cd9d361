"""The kubelet's part in gRPC's reference implementation, blocking, each message with the moment at which it came.

It does the least that an agent asks for, so that a time is the agent's and not that of a kubelet's bookkeeping.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import grpc

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.sockets import CHANNEL_OPTIONS, address

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
_LIST = "/v1beta1.DevicePlugin/ListAndWatch"


class Registered(NamedTuple):
    """A call of `Register`."""

    at: float
    resource: str
    socket: str


class Listed(NamedTuple):
    """A list: the health of each id of a resource."""

    at: float
    resource: str
    devices: Mapping[str, str]


class Registry:
    """Takes registrations below `kubelet_dir` and listens to every resource."""

    def __init__(self, kubelet_dir: str) -> None:
        self.registered: queue.SimpleQueue[Registered] = queue.SimpleQueue()
        self.listed: queue.SimpleQueue[Listed] = queue.SimpleQueue()
        self._directory = os.path.join(kubelet_dir, "device-plugins")
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._channels: list[grpc.Channel] = []
        methods = {
            "Register": grpc.unary_unary_rpc_method_handler(
                self._register,
                request_deserializer=pb.RegisterRequest.FromString,
                response_serializer=pb.Empty.SerializeToString,
            )
        }
        handler = grpc.method_handlers_generic_handler("v1beta1.Registration", methods)
        self._server.add_generic_rpc_handlers((handler,))

    def __enter__(self) -> Self:
        self._server.add_insecure_port(address(f"{self._directory}/kubelet.sock"))
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        for channel in self._channels:
            channel.close()

    def registrations(self, count: int) -> Mapping[str, Registered]:
        """The next ones, by resource. Raises `queue.Empty` when they do not come."""
        return {one.resource: one for one in (self.registered.get(timeout=30) for _ in range(count))}

    def until(self, wanted: Callable[[Listed], bool], seconds: float = 30) -> Listed:
        """The next list that is `wanted`; those before it are dropped. Raises `queue.Empty`."""
        while True:
            listed = self.listed.get(timeout=seconds)
            if wanted(listed):
                return listed

    def _register(self, request: pb.RegisterRequest, _context: object) -> pb.Empty:
        registered = Registered(time.perf_counter(), request.resource_name, f"{self._directory}/{request.endpoint}")
        self.registered.put(registered)
        threading.Thread(target=self._listen, args=(registered,), daemon=True).start()
        return pb.Empty()

    def _listen(self, registered: Registered) -> None:
        opened = channel(registered.socket)
        self._channels.append(opened)
        follow = opened.unary_stream(
            _LIST,
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        try:
            for message in follow(pb.Empty()):
                at = time.perf_counter()
                self.listed.put(Listed(at, registered.resource, {one.ID: one.health for one in message.devices}))
        except grpc.RpcError:
            return  # the agent has ended, or this registry


def channel(path: str) -> grpc.Channel:
    """A connection of its own to the socket at `path`."""
    return grpc.insecure_channel(address(path), options=(*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


def allocate_request(*ids: str) -> pb.AllocateRequest:
    """A container's wish for these devices."""
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])


class ReferenceClient:
    """Calls `Allocate` by the reference implementation's blocking client."""

    def __init__(self, path: str) -> None:
        self._channel = channel(path)
        self._allocate: Any = self._channel.unary_unary(
            ALLOCATE,
            request_serializer=pb.AllocateRequest.SerializeToString,
            response_deserializer=pb.AllocateResponse.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        return self._allocate(request, timeout=10)
