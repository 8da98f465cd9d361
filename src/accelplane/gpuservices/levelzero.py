"""Client of the Level-Zero service, which reads GPU health and temperatures in a separate process.

Contract: proto/levelzero.proto. The service responds to every call; values that it could not read come with an error
code and a harmless default (true, -999.0), so that the other values of the response can be used.
"""

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import Message

from accelplane import rpc
from accelplane.gpuservices import levelzero_pb2 as pb

MAX_INDICES = 1024
_MAX_MESSAGE = 1024 * 1024
_SERVICE = "/Levelzero/"
_READ_DELAY = 0.05  # most services respond within this time; then one read returns all responses


class LevelZeroError(Exception):
    """A call failed. The message names the socket and the call."""


class ReadError(NamedTuple):
    """Why the service could not read a value: a ze_result_t of the Level-Zero specification."""

    code: int
    text: str

    def __str__(self) -> str:
        return self.text or f"error 0x{self.code:X}"


class Readings(NamedTuple):
    """The readings of one device.

    `failed_parts` are those of memory, bus and SoC that are not ok. `temperatures` are degrees Celsius of the sensors
    global, gpu and memory, -999.0 if one is missing or failed. `problem` is why a call failed, empty if none did.
    """

    failed_parts: tuple[str, ...]
    temperatures: tuple[float, float, float] | None
    errors: tuple[ReadError, ...]
    problem: str


class LevelZero:
    """One connection to the service, opened at the first call and again when lost. Calls take at most `deadline` s."""

    def __init__(self, socket: str, deadline: float = 2.0) -> None:
        self.closed = False
        self._socket = socket
        self._deadline = deadline
        self._channel = rpc.Channel(socket, max_message=_MAX_MESSAGE)

    async def readings(self, bdfs: Sequence[str]) -> list[Readings]:
        """The readings of the devices at these PCI addresses, queried concurrently."""
        if not bdfs:
            return []
        requests = [pb.DeviceId(bdfAddress=bdf) for bdf in bdfs]
        calls: list[tuple[str, Message, type[pb.DeviceHealth | pb.DeviceTemperature]]] = [
            *((f"{_SERVICE}GetDeviceHealth", request, pb.DeviceHealth) for request in requests),
            *((f"{_SERVICE}GetDeviceTemperature", request, pb.DeviceTemperature) for request in requests),
        ]
        responses = await self._call_all(calls)
        return [self._readings(responses[number :: len(requests)]) for number in range(len(requests))]

    async def indices(self) -> list[int]:
        """The positions of Intel's devices among all that Level-Zero sees, ascending. Raises `LevelZeroError`."""
        try:
            response = await self._channel.call(
                f"{_SERVICE}GetIntelIndices", pb.GetIntelIndicesMessage(), pb.DeviceIndices, deadline=self._deadline
            )
        except rpc.RpcError as error:
            raise self._error("GetIntelIndices", str(error)) from None
        indices = sorted(set(response.indices))
        if len(indices) > MAX_INDICES:
            raise self._error("GetIntelIndices", f"found {len(indices)} devices, expected at most {MAX_INDICES}")
        return indices

    async def memory_sizes(self, bdfs: Sequence[str]) -> dict[str, int]:
        """The bytes of memory of the devices at these PCI addresses. Devices without an answer are missing."""
        calls: list[tuple[str, Message, type[pb.DeviceMemoryAmount]]] = [
            (f"{_SERVICE}GetDeviceMemoryAmount", pb.DeviceId(bdfAddress=bdf), pb.DeviceMemoryAmount) for bdf in bdfs
        ]
        return {
            bdf: response.memory_size
            for bdf, response in zip(bdfs, await self._call_all(calls), strict=True)
            if not isinstance(response, rpc.RpcError) and response.memory_size
        }

    def close(self) -> None:
        """Closes the connection for good. Later calls fail."""
        self.closed = True
        self._channel.close()

    async def _call_all(
        self, calls: Sequence[tuple[str, Message, type[rpc.Response]]]
    ) -> Sequence[rpc.Response | rpc.RpcError]:
        try:
            return await self._channel.call_all(calls, deadline=self._deadline, read_delay=_READ_DELAY)
        except rpc.RpcError as error:
            return [error] * len(calls)

    def _readings(self, responses: Sequence[pb.DeviceHealth | pb.DeviceTemperature | rpc.RpcError]) -> Readings:
        failed_parts: tuple[str, ...] = ()
        temperatures: tuple[float, float, float] | None = None
        errors: list[ReadError] = []
        problem = ""
        for call, response in zip(("GetDeviceHealth", "GetDeviceTemperature"), responses, strict=True):
            if isinstance(response, rpc.RpcError):
                problem = problem or str(self._error(call, str(response)))
                continue
            if isinstance(response, pb.DeviceHealth):
                parts = (("memory", response.memory_ok), ("bus", response.bus_ok), ("SoC", response.soc_ok))
                failed_parts = tuple(part for part, ok in parts if not ok)
            else:
                temperatures = (getattr(response, "global"), response.gpu, response.memory)
            if response.error.errorcode:
                errors.append(ReadError(response.error.errorcode, " ".join(response.error.description.split())[:200]))
        return Readings(failed_parts, temperatures, tuple(dict.fromkeys(errors)), problem)

    def _error(self, call: str, problem: str) -> LevelZeroError:
        return LevelZeroError(f"Level-Zero service at {self._socket}: {call}: {' '.join(problem.split())[:300]}")
