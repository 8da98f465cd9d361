"""A proxy between a kubelet and a device plugin, which can delay an Allocate call until another event.

The plugin finds it in its own directory as the kubelet. It forwards the registration to the real kubelet with a socket
of its own in the kubelet's directory, and forwards each call on this socket to the plugin that has registered last.
While it holds a call, the kubelet does not notice that the plugin ends or registers again.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.sockets import CHANNEL_OPTIONS

from .machine import wait_until

_REGISTER = "/v1beta1.Registration/Register"
_WAIT = 120.0


class DeviceProxy:
    """`kubelet` and `plugin` are directories, as this process sees them."""

    def __init__(self, kubelet: Path, plugin: Path) -> None:
        self.registrations: list[str] = []
        self.held_calls: list[str] = []
        self._holding = False
        self._release = threading.Event()
        self._resume = threading.Event()
        self._plugins: dict[str, grpc.Channel] = {}
        self._servers: dict[str, grpc.Server] = {}
        self._requests: dict[str, pb.RegisterRequest] = {}
        self._waiting: set[str] = set()
        self._forwarding = threading.Lock()
        self._kubelet_server: grpc.Server | None = None
        # Socket paths must be short.
        self._directory = tempfile.TemporaryDirectory(prefix="ap")
        self._kubelet, self._plugin = (Path(self._directory.name) / name for name in "kp")
        self._kubelet.symlink_to(kubelet)
        self._plugin.symlink_to(plugin)

    def start(self) -> None:
        """Becomes the plugin's kubelet."""
        self._kubelet_server = _serve(self._plugin / "kubelet.sock", lambda _method: _unary(self._register))

    def stop(self) -> None:
        self._release.set()
        self._resume.set()
        for server in (self._kubelet_server, *self._servers.values()):
            if server is not None:
                server.stop(None).wait()
        for channel in self._plugins.values():
            channel.close()
        self._directory.cleanup()

    @contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        """Holds the next Allocate call. Yields a function that waits for it; the call continues after the block.

        After the call, the kubelet sees the end of the plugin's streams and the registrations since.
        """
        self.held_calls.clear()
        self._release.clear()
        self._resume.clear()
        self._holding = True
        try:
            yield lambda: wait_until(lambda: bool(self.held_calls), "an Allocate call", 60)
        finally:
            self._release.set()
            self._holding = False
        wait_until(lambda: not self.held_calls, "the end of the call that was held", 60)
        self._resume.set()
        for resource in sorted(self._waiting):
            self._forward(resource)
        self._waiting.clear()

    def restart_kubelet(self, kill: Callable[[], object], start: Callable[[], object]) -> None:
        """Kills the kubelet, whose call is held, and starts the next one, with which the plugin is registered again."""
        kill()
        self._holding = False
        self._release.set()
        wait_until(lambda: not self.held_calls, "the end of the call that was held", 60)
        socket = self._kubelet / "kubelet.sock"
        socket.unlink()
        with self._forwarding:
            for server in self._servers.values():
                server.stop(None).wait()
            self._servers.clear()
        start()
        wait_until(socket.exists, "the kubelet's socket", 60)
        for resource in self._requests:
            self._forward(resource, again=False)

    def _register(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        decoded = pb.RegisterRequest.FromString(request)
        resource, path = decoded.resource_name, f"{self._plugin}/{decoded.endpoint}"
        self._plugins[resource] = grpc.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS)
        self._requests[resource] = decoded
        if self._holding:
            self._waiting.add(resource)
        else:
            self._forward(resource)
        self.registrations.append(decoded.resource_name)
        return pb.Empty().SerializeToString()

    def _forward(self, resource: str, *, again: bool = True) -> None:
        """Registers the plugin of a resource with the real kubelet, at a new socket; unless `again`, once only."""
        with self._forwarding:
            if (old := self._servers.pop(resource, None)) is not None:
                if not again:
                    self._servers[resource] = old
                    return
                old.stop(None).wait()
            request = self._requests[resource]
            path = self._kubelet / request.endpoint
            self._servers[resource] = _serve(path, lambda method: self._handler(resource, method))
            with grpc.insecure_channel(f"unix:{self._kubelet}/kubelet.sock", CHANNEL_OPTIONS) as channel:
                channel.unary_unary(_REGISTER)(request.SerializeToString(), timeout=60, wait_for_ready=True)

    def _handler(self, resource: str, method: str) -> grpc.RpcMethodHandler:
        if method.endswith("/ListAndWatch"):
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: self._list_and_watch(resource, method, request, context)
            )
        return _unary(lambda request, context: self._call(resource, method, request, context))

    def _call(self, resource: str, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method.endswith("/Allocate") and self._holding and not self.held_calls:
            self.held_calls.append(resource)
            self._release.wait(_WAIT)
            try:
                if not context.is_active():
                    context.abort(grpc.StatusCode.CANCELLED, "the kubelet has ended")
                return self._answer(resource, method, request, context)
            finally:
                self.held_calls.clear()
        return self._answer(resource, method, request, context)

    def _answer(self, resource: str, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return self._plugins[resource].unary_unary(method)(request, timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            call: Any = error
            context.abort(call.code(), call.details())
            raise

    def _list_and_watch(
        self, resource: str, method: str, request: bytes, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        call = self._plugins[resource].unary_stream(method)(request, wait_for_ready=True)

        def cancel() -> None:
            call.cancel()

        context.add_callback(cancel)
        with suppress(grpc.RpcError):
            yield from call
        if self._holding and context.is_active():
            self._resume.wait(_WAIT)


def _unary(call: Callable[[bytes, grpc.ServicerContext], bytes]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(call)


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of all methods, whose messages stay bytes."""

    def __init__(self, handler: Callable[[str], grpc.RpcMethodHandler]) -> None:
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handler(handler_call_details.method)


def _serve(path: Path, handler: Callable[[str], grpc.RpcMethodHandler]) -> grpc.Server:
    with suppress(FileNotFoundError):
        os.unlink(path)
    server = grpc.server(ThreadPoolExecutor(16), [_Handlers(handler)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server
