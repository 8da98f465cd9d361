"""A simulated Level-Zero service for the GPU plugin: real gRPC, simulated readings.

It uses the reference implementation of gRPC, as the real service does (`proto/levelzero.proto`). Calls never fail on
the gRPC level; each response has an `error`, which is empty for success. Methods set the readings of each device and
the faults of the service.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable
from typing import Self

import grpc.aio
import msgspec

from accelplane.gpuservices import levelzero_pb2 as messages
from accelplane.gpuservices.zeapi import UNKNOWN, error_text
from accelplane.kubelet.embedded.service import service

NO_TEMPERATURE = -999.0


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """The readings of one device: temperatures in degrees Celsius, memory in bytes."""

    memory_ok: bool = True
    bus_ok: bool = True
    soc_ok: bool = True
    overall: float = 40.0
    gpu: float = 41.0
    memory: float = 42.0
    memory_size: int = 16 * 1024**3


_NO_READINGS = Readings(overall=NO_TEMPERATURE, gpu=NO_TEMPERATURE, memory=NO_TEMPERATURE, memory_size=0)


class LevelZeroService:
    """The service on a socket. It serves from `start` to `stop` or as a context manager and can be started again.

    It has the devices in `bdfs`, or every device that a call names if that is None. `indices` is the response to
    `GetIntelIndices`, `calls` counts the calls by method.
    """

    def __init__(self, socket: str | os.PathLike[str], bdfs: Iterable[str] | None = None) -> None:
        self.socket = os.fspath(socket)
        self._server: grpc.aio.Server | None = None
        self.indices: list[int] = [0]
        self.calls: Counter[str] = Counter()
        self._readings = {bdf: Readings() for bdf in bdfs or ()}
        self._has_all = bdfs is None
        self._codes: dict[str | None, int] = {}
        self._responding = asyncio.Event()
        self._responding.set()

    def set_health(self, bdf: str, *, memory: bool = True, bus: bool = True, soc: bool = True) -> None:
        """Sets which parts of a device are ok."""
        self._change(bdf, memory_ok=memory, bus_ok=bus, soc_ok=soc)

    def set_temperature(self, bdf: str, *, overall: float = 40.0, gpu: float = 41.0, memory: float = 42.0) -> None:
        """Sets the temperatures of a device. `overall` is the sensor that the protocol calls global."""
        self._change(bdf, overall=overall, gpu=gpu, memory=memory)

    def set_memory(self, bdf: str, size: int) -> None:
        """Sets the memory of a device in bytes."""
        self._change(bdf, memory_size=size)

    def fail(self, code: int, bdf: str | None = None) -> None:
        """Sets the ze_result code of all further responses, for one device or for all; 0 is success."""
        self._codes[bdf] = code

    def hang(self) -> None:
        """Delays all responses until `resume`."""
        self._responding.clear()

    def resume(self) -> None:
        """Ends `hang` and sends the delayed responses."""
        self._responding.set()

    async def start(self) -> None:
        """Starts serving on the socket and creates its directory if necessary. Raises `RuntimeError` if it fails."""
        os.makedirs(os.path.dirname(self.socket) or ".", exist_ok=True)
        server = grpc.aio.server()
        handlers = {
            "GetDeviceHealth": (self._health, messages.DeviceId),
            "GetDeviceTemperature": (self._temperature, messages.DeviceId),
            "GetIntelIndices": (self._indices, messages.GetIntelIndicesMessage),
            "GetDeviceMemoryAmount": (self._memory, messages.DeviceId),
        }
        server.add_generic_rpc_handlers((service("Levelzero", handlers),))
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

    def _change(self, bdf: str, **changes: float) -> None:
        self._readings[bdf] = msgspec.structs.replace(self._readings.get(bdf, Readings()), **changes)

    async def _health(self, request: messages.DeviceId, _context: object) -> messages.DeviceHealth:
        readings, error = await self._respond("GetDeviceHealth", request.bdfAddress)
        return messages.DeviceHealth(
            memory_ok=readings.memory_ok, bus_ok=readings.bus_ok, soc_ok=readings.soc_ok, error=error
        )

    async def _temperature(self, request: messages.DeviceId, _context: object) -> messages.DeviceTemperature:
        readings, error = await self._respond("GetDeviceTemperature", request.bdfAddress)
        response = messages.DeviceTemperature(gpu=readings.gpu, memory=readings.memory, error=error)
        setattr(response, "global", readings.overall)  # a keyword of Python
        return response

    async def _indices(self, _request: messages.GetIntelIndicesMessage, _context: object) -> messages.DeviceIndices:
        self.calls["GetIntelIndices"] += 1
        await self._responding.wait()
        code = self._codes.get(None, 0)
        return messages.DeviceIndices(indices=[] if code else self.indices, error=_error(code))

    async def _memory(self, request: messages.DeviceId, _context: object) -> messages.DeviceMemoryAmount:
        readings, error = await self._respond("GetDeviceMemoryAmount", request.bdfAddress)
        return messages.DeviceMemoryAmount(memory_size=readings.memory_size, error=error)

    async def _respond(self, method: str, bdf: str) -> tuple[Readings, messages.Error]:
        self.calls[method] += 1
        await self._responding.wait()
        code = self._codes.get(bdf) or self._codes.get(None, 0)
        if not self._has_all and bdf not in self._readings:
            code = code or UNKNOWN
        return (_NO_READINGS if code else self._readings.get(bdf, Readings())), _error(code)


def _error(code: int) -> messages.Error:
    if not code:
        return messages.Error()
    return messages.Error(description=error_text(code), errorcode=code)
