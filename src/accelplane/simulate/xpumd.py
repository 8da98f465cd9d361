"""A stand-in for xpumd's device information service: real gRPC, made-up health (`proto/xpumd.proto`).

A stream gets everything that is known when it begins, and again after each change.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc
import grpc.aio

from accelplane.sidecars import xpumd_pb2 as messages
from accelplane.simulate.double import Double

Severity = Literal["unknown", "ok", "warning", "critical", "failed"]

_SEVERITIES: dict[Severity, messages.SeverityLevel.ValueType] = {
    "unknown": messages.SEVERITY_LEVEL_UNKNOWN,
    "ok": messages.SEVERITY_LEVEL_OK,
    "warning": messages.SEVERITY_LEVEL_WARNING,
    "critical": messages.SEVERITY_LEVEL_CRITICAL,
    "failed": messages.SEVERITY_LEVEL_FAILED,
}

_Stream = asyncio.Queue[messages.DeviceHealthResponse | grpc.StatusCode]


class XpumdService(Double):
    """The service on a socket, from `start` to `stop` or as a context manager; it can be started again."""

    def __init__(self, socket: str | os.PathLike[str]) -> None:
        super().__init__(socket)
        self._devices: dict[str, dict[str, messages.HealthStatus]] = {}
        self._streams: list[_Stream] = []

    @property
    def streams(self) -> int:
        """How many clients listen."""
        return len(self._streams)

    def set_health(self, bdf: str, severity: Severity = "ok", *, name: str = "memory", reason: str = "") -> None:
        """Says how one part of a device is, and tells every stream."""
        self._devices.setdefault(bdf, {})[name] = messages.HealthStatus(
            name=name, severity=_SEVERITIES[severity], reason=reason, message=f"{name} is {severity}"
        )
        self.send(self._everything())

    def remove(self, bdf: str) -> None:
        """Leaves a device out from now on, and tells every stream."""
        self._devices.pop(bdf, None)
        self.send(self._everything())

    def send(self, response: messages.DeviceHealthResponse) -> None:
        """Sends every stream that message, whatever it is."""
        for stream in self._streams:
            stream.put_nowait(response)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Ends every stream; with another code than OK as an error."""
        for stream in self._streams:
            stream.put_nowait(code)

    def handlers(self) -> tuple[str, dict[str, Any]]:
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=messages.WatchDeviceHealthRequest.FromString,
            response_serializer=messages.DeviceHealthResponse.SerializeToString,
        )
        return "deviceinfo.DeviceInfo", {"WatchDeviceHealth": watch}

    async def _watch(
        self, _request: messages.WatchDeviceHealthRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[messages.DeviceHealthResponse]:
        stream: _Stream = asyncio.Queue()
        stream.put_nowait(self._everything())
        self._streams.append(stream)
        try:
            while True:
                item = await stream.get()
                if isinstance(item, messages.DeviceHealthResponse):
                    yield item
                elif item is grpc.StatusCode.OK:
                    return
                else:
                    await context.abort(item, "the simulated service broke off")
        finally:
            self._streams.remove(stream)

    def _everything(self) -> messages.DeviceHealthResponse:
        return messages.DeviceHealthResponse(
            devices=[
                messages.DeviceHealth(
                    info=messages.DeviceInformation(pci=messages.PciInfo(bdf=bdf, vendor_id="0x8086")),
                    health=parts.values(),
                )
                for bdf, parts in self._devices.items()
            ]
        )
