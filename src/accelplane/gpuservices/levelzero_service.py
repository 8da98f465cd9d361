"""The gRPC service `Levelzero`: health, temperatures, memory and indices of GPUs, for the GPU plugin.

Contract: proto/levelzero.proto. Calls never fail on the gRPC level. A response has an error, empty for success, and a
harmless default for each value that could not be read (true, -999.0, 0).
"""

import re
from collections.abc import Mapping

from accelplane import rpc
from accelplane.gpuservices import levelzero_pb2 as pb
from accelplane.gpuservices.zeapi import UNKNOWN, error_text
from accelplane.gpuservices.zeprocess import RequestError, ZeProcess
from accelplane.gpuservices.zereadings import NO_TEMPERATURE

_SERVICE = "/Levelzero/"
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2,8}:[0-9a-f]{2,8}\.[0-9a-f]{1,8}")


class LevelZeroService:
    def __init__(self, process: ZeProcess) -> None:
        self._process = process

    def methods(self) -> Mapping[str, rpc.Method]:
        return {
            f"{_SERVICE}GetDeviceHealth": rpc.unary(pb.DeviceId, pb.DeviceHealth, self._health),
            f"{_SERVICE}GetDeviceTemperature": rpc.unary(pb.DeviceId, pb.DeviceTemperature, self._temperature),
            f"{_SERVICE}GetIntelIndices": rpc.unary(pb.GetIntelIndicesMessage, pb.DeviceIndices, self._indices),
            f"{_SERVICE}GetDeviceMemoryAmount": rpc.unary(pb.DeviceId, pb.DeviceMemoryAmount, self._memory),
        }

    async def _health(self, request: pb.DeviceId) -> pb.DeviceHealth:
        error, values = await self._ask("health", ("1", "1"), request.bdfAddress)
        memory, bus = (value == "1" for value in values)
        return pb.DeviceHealth(memory_ok=memory, bus_ok=bus, soc_ok=True, error=error)

    async def _temperature(self, request: pb.DeviceId) -> pb.DeviceTemperature:
        error, values = await self._ask("temperature", (str(NO_TEMPERATURE),) * 3, request.bdfAddress)
        overall, gpu, memory = map(float, values)
        response = pb.DeviceTemperature(gpu=gpu, memory=memory, error=error)
        setattr(response, "global", overall)  # a keyword of Python
        return response

    async def _memory(self, request: pb.DeviceId) -> pb.DeviceMemoryAmount:
        error, (size,) = await self._ask("memory", ("0",), request.bdfAddress)
        return pb.DeviceMemoryAmount(memory_size=int(size), error=error)

    async def _indices(self, _request: pb.GetIntelIndicesMessage) -> pb.DeviceIndices:
        error, values = await self._ask("indices", ())
        return pb.DeviceIndices(indices=map(int, values), error=error)

    async def _ask(
        self, request: str, defaults: tuple[str, ...], bdf: str | None = None
    ) -> tuple[pb.Error, tuple[str, ...]]:
        if bdf is not None and not _BDF.fullmatch(bdf):
            return _error(UNKNOWN), defaults
        try:
            code, *values = await self._process.ask(request, bdf or "")
        except RequestError as error:
            return _error(error.code), defaults
        return _error(int(code)), tuple(values)


def _error(code: int) -> pb.Error:
    return pb.Error(description=error_text(code), errorcode=code) if code else pb.Error()
