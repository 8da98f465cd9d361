"""A minimal kubelet on gRPC's reference implementation (grpcio, blocking) that records when each message arrived.

It does no bookkeeping, so that measured times are those of the agent.
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


class Registration(NamedTuple):
    """A call of `Register`, with the time of its arrival."""

    at: float
    resource: str
    socket: str


class DeviceList(NamedTuple):
    """A message of `ListAndWatch`: the health of each device ID of a resource."""

    at: float
    resource: str
    devices: Mapping[str, str]


class ReferenceKubelet:
    """Accepts registrations below `kubelet_dir` and calls `ListAndWatch` of every resource."""

    def __init__(self, kubelet_dir: str) -> None:
        self._registrations: queue.SimpleQueue[Registration] = queue.SimpleQueue()
        self._device_lists: queue.SimpleQueue[DeviceList] = queue.SimpleQueue()
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

    def registrations(self, count: int) -> Mapping[str, Registration]:
        """The next `count` registrations, by resource. Raises `queue.Empty` after 30 s without one."""
        return {one.resource: one for one in (self._registrations.get(timeout=30) for _ in range(count))}

    def wait_for(self, predicate: Callable[[DeviceList], bool], seconds: float = 30) -> DeviceList:
        """Returns the next list that matches, and drops those before it. Raises `queue.Empty` after the timeout."""
        while True:
            device_list = self._device_lists.get(timeout=seconds)
            if predicate(device_list):
                return device_list

    def _register(self, request: pb.RegisterRequest, _context: object) -> pb.Empty:
        registration = Registration(time.perf_counter(), request.resource_name, f"{self._directory}/{request.endpoint}")
        self._registrations.put(registration)
        threading.Thread(target=self._listen, args=(registration,), daemon=True).start()
        return pb.Empty()

    def _listen(self, registration: Registration) -> None:
        stub_channel = channel(registration.socket)
        self._channels.append(stub_channel)
        list_and_watch = stub_channel.unary_stream(
            _LIST,
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        try:
            for message in list_and_watch(pb.Empty()):
                at = time.perf_counter()
                self._device_lists.put(
                    DeviceList(at, registration.resource, {one.ID: one.health for one in message.devices})
                )
        except grpc.RpcError:
            return  # the agent or this server has ended


def channel(path: str) -> grpc.Channel:
    """A separate connection to the socket at `path`."""
    return grpc.insecure_channel(address(path), options=(*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


def allocate_request(*ids: str) -> pb.AllocateRequest:
    """The request of one container for these devices."""
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])


class ReferenceClient:
    """Calls `Allocate` with the blocking client of grpcio."""

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
