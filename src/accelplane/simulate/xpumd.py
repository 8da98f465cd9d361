"""A simulated device information service of xpumd: real gRPC, simulated health (`proto/xpumd.proto`).

A stream starts with the health of all devices and repeats it after each change.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc
import grpc.aio

from accelplane.sidecars import xpumd_pb2 as messages
from accelplane.simulate.service import SimulatedService

Severity = Literal["unknown", "ok", "warning", "critical", "failed"]

_SEVERITIES: dict[Severity, messages.SeverityLevel.ValueType] = {
    "unknown": messages.SEVERITY_LEVEL_UNKNOWN,
    "ok": messages.SEVERITY_LEVEL_OK,
    "warning": messages.SEVERITY_LEVEL_WARNING,
    "critical": messages.SEVERITY_LEVEL_CRITICAL,
    "failed": messages.SEVERITY_LEVEL_FAILED,
}

_Stream = asyncio.Queue[messages.DeviceHealthResponse | grpc.StatusCode]


class XpumdService(SimulatedService):
    """The service on a socket."""

    def __init__(self, socket: str | os.PathLike[str]) -> None:
        super().__init__(socket)
        self._devices: dict[str, dict[str, messages.HealthStatus]] = {}
        self._streams: list[_Stream] = []

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def set_health(self, bdf: str, severity: Severity = "ok", *, name: str = "memory", reason: str = "") -> None:
        """Sets the health of one part of a device and sends it to all streams."""
        self._devices.setdefault(bdf, {})[name] = messages.HealthStatus(
            name=name, severity=_SEVERITIES[severity], reason=reason, message=f"{name} is {severity}"
        )
        self.send(self._all_devices())

    def remove(self, bdf: str) -> None:
        """Removes a device from all further messages and sends one to all streams."""
        self._devices.pop(bdf, None)
        self.send(self._all_devices())

    def send(self, response: messages.DeviceHealthResponse) -> None:
        """Sends the message to all streams, valid or not."""
        for stream in self._streams:
            stream.put_nowait(response)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Ends all streams with the status `code`."""
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
        stream.put_nowait(self._all_devices())
        self._streams.append(stream)
        try:
            while True:
                item = await stream.get()
                if isinstance(item, messages.DeviceHealthResponse):
                    yield item
                elif item is grpc.StatusCode.OK:
                    return
                else:
                    await context.abort(item, "the simulated service failed")
        finally:
            self._streams.remove(stream)

    def _all_devices(self) -> messages.DeviceHealthResponse:
        return messages.DeviceHealthResponse(
            devices=[
                messages.DeviceHealth(
                    info=messages.DeviceInformation(pci=messages.PciInfo(bdf=bdf, vendor_id="0x8086")),
                    health=parts.values(),
                )
                for bdf, parts in self._devices.items()
            ]
        )
