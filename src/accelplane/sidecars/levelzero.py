"""Client of the Level-Zero service, which reads GPU health and temperatures in a process of its own.

Contract: proto/levelzero.proto. The service answers every call; what it could not read comes with an error code and a
harmless value (true, -999.0), so that a good part of an answer is not lost with a bad one.
"""

from collections.abc import Callable
from typing import NamedTuple

import grpc
import grpc.aio

from accelplane.sidecars import levelzero_pb2 as pb
from accelplane.sidecars.channel import explained, open_channel

MAX_INDICES = 1024


class LevelZeroError(Exception):
    """The service did not answer, or not sensibly. The message names its socket and the call."""


class Fault(NamedTuple):
    """What the service could not read: a ze_result_t of the Level-Zero specification, 0 when all went well."""

    code: int
    text: str

    def __str__(self) -> str:
        return self.text or f"error 0x{self.code:X}"


class Condition(NamedTuple):
    """Whether a device's parts are well."""

    memory: bool
    bus: bool
    soc: bool
    fault: Fault


class Temperatures(NamedTuple):
    """Degrees Celsius; -999.0 where a sensor is missing or failed. `overall` is the service's `global`."""

    overall: float
    gpu: float
    memory: float
    fault: Fault


class LevelZero:
    """One connection to the service, which restores itself. Calls end within `deadline` seconds."""

    def __init__(self, socket: str, deadline: float = 2.0) -> None:
        self._socket = socket
        self._deadline = deadline
        self._channel = open_channel(socket)
        self._get_health = self._channel.unary_unary(
            "/Levelzero/GetDeviceHealth",
            request_serializer=pb.DeviceId.SerializeToString,
            response_deserializer=pb.DeviceHealth.FromString,
        )
        self._get_temperature = self._channel.unary_unary(
            "/Levelzero/GetDeviceTemperature",
            request_serializer=pb.DeviceId.SerializeToString,
            response_deserializer=pb.DeviceTemperature.FromString,
        )
        self._get_indices = self._channel.unary_unary(
            "/Levelzero/GetIntelIndices",
            request_serializer=pb.GetIntelIndicesMessage.SerializeToString,
            response_deserializer=pb.DeviceIndices.FromString,
        )

    async def condition(self, bdf: str) -> Condition:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        try:
            answer: pb.DeviceHealth = await self._get_health(pb.DeviceId(bdfAddress=bdf), timeout=self._deadline)
        except grpc.aio.AioRpcError as error:
            raise self._failed("GetDeviceHealth", error) from None
        return Condition(answer.memory_ok, answer.bus_ok, answer.soc_ok, _fault(answer.error))

    async def temperatures(self, bdf: str) -> Temperatures:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        try:
            answer: pb.DeviceTemperature = await self._get_temperature(
                pb.DeviceId(bdfAddress=bdf), timeout=self._deadline
            )
        except grpc.aio.AioRpcError as error:
            raise self._failed("GetDeviceTemperature", error) from None
        return Temperatures(getattr(answer, "global"), answer.gpu, answer.memory, _fault(answer.error))

    async def indices(self) -> list[int]:
        """The positions of Intel's devices among all that Level-Zero sees, ascending. Raises `LevelZeroError`."""
        try:
            answer: pb.DeviceIndices = await self._get_indices(pb.GetIntelIndicesMessage(), timeout=self._deadline)
        except grpc.aio.AioRpcError as error:
            raise self._failed("GetIntelIndices", error) from None
        found = sorted(set(answer.indices))
        if len(found) > MAX_INDICES:
            raise LevelZeroError(
                f"Level-Zero service at {self._socket}: GetIntelIndices names {len(found)} devices, "
                f"expected at most {MAX_INDICES}"
            )
        return found

    async def follow(self, connected: Callable[[], None]) -> None:
        """Keeps the connection up, and calls `connected` each time it was made. Runs until cancelled."""
        state = self._channel.get_state(try_to_connect=True)
        while True:
            if state is grpc.ChannelConnectivity.READY:
                connected()
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        await self._channel.close()

    def _failed(self, call: str, error: grpc.aio.AioRpcError) -> LevelZeroError:
        return LevelZeroError(f"Level-Zero service at {self._socket}: {call}: {explained(error)}")


def _fault(error: pb.Error) -> Fault:
    return Fault(error.errorcode, " ".join(error.description.split())[:200])
