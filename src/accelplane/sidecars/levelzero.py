"""Client of the Level-Zero service, which reads GPU health and temperatures in a process of its own.

Contract: proto/levelzero.proto. The service responds to every call; values that it could not read come with an error
code and a harmless default (true, -999.0), so that the other values of the response can be used.
"""

from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from accelplane import rpc
from accelplane.sidecars import levelzero_pb2 as pb

MAX_INDICES = 1024
_MAX_MESSAGE = 1024 * 1024

_Response = TypeVar("_Response", bound=Message)


class LevelZeroError(Exception):
    """A call failed. The message names the socket and the call."""


class ReadError(NamedTuple):
    """Why the service could not read a value: a ze_result_t of the Level-Zero specification, 0 for success."""

    code: int
    text: str

    def __str__(self) -> str:
        return self.text or f"error 0x{self.code:X}"


class DeviceHealth(NamedTuple):
    """The parts of a device that are not ok."""

    failed: tuple[str, ...]
    error: ReadError


class Temperatures(NamedTuple):
    """Degrees Celsius of the sensors global, gpu and memory; -999.0 if a sensor is missing or failed."""

    values: tuple[float, float, float]
    error: ReadError


class LevelZero:
    """One connection to the service, opened at the first call and again when lost. Calls take at most `deadline` s."""

    def __init__(self, socket: str, deadline: float = 2.0) -> None:
        self.closed = False
        self._socket = socket
        self._deadline = deadline
        self._channel = rpc.Channel(socket, max_message=_MAX_MESSAGE)

    async def health(self, bdf: str) -> DeviceHealth:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        response = await self._call("GetDeviceHealth", pb.DeviceId(bdfAddress=bdf), pb.DeviceHealth)
        parts = (("memory", response.memory_ok), ("bus", response.bus_ok), ("SoC", response.soc_ok))
        return DeviceHealth(tuple(part for part, ok in parts if not ok), _read_error(response.error))

    async def temperatures(self, bdf: str) -> Temperatures:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        response = await self._call("GetDeviceTemperature", pb.DeviceId(bdfAddress=bdf), pb.DeviceTemperature)
        values = (getattr(response, "global"), response.gpu, response.memory)
        return Temperatures(values, _read_error(response.error))

    async def indices(self) -> list[int]:
        """The positions of Intel's devices among all that Level-Zero sees, ascending. Raises `LevelZeroError`."""
        response = await self._call("GetIntelIndices", pb.GetIntelIndicesMessage(), pb.DeviceIndices)
        indices = sorted(set(response.indices))
        if len(indices) > MAX_INDICES:
            raise self._error("GetIntelIndices", f"found {len(indices)} devices, expected at most {MAX_INDICES}")
        return indices

    def close(self) -> None:
        """Closes the connection for good: later calls fail."""
        self.closed = True
        self._channel.close()

    async def _call(self, call: str, request: Message, response_type: type[_Response]) -> _Response:
        if self.closed:
            raise self._error(call, "UNAVAILABLE: the channel is closed")
        try:
            return await self._channel.call(f"/Levelzero/{call}", request, response_type, deadline=self._deadline)
        except rpc.RpcError as error:
            raise self._error(call, str(error)) from None

    def _error(self, call: str, problem: str) -> LevelZeroError:
        return LevelZeroError(f"Level-Zero service at {self._socket}: {call}: {' '.join(problem.split())[:300]}")


def _read_error(error: pb.Error) -> ReadError:
    return ReadError(error.errorcode, " ".join(error.description.split())[:200])
