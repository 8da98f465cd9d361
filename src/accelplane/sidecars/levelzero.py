"""Client of the Level-Zero service, which reads GPU health and temperatures in a process of its own.

Contract: proto/levelzero.proto. The service answers every call; what it could not read comes with an error code and a
harmless value (true, -999.0), so that a good part of an answer is not lost with a bad one.
"""

from collections.abc import Callable
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from accelplane.sidecars import levelzero_pb2 as pb
from accelplane.sidecars.channel import explained, open_channel

MAX_INDICES = 1024

_Ask = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


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
        # Answers are decoded here: gRPC would hand out None for one that is not a message, and print a traceback.
        self._get_health: _Ask = self._channel.unary_unary("/Levelzero/GetDeviceHealth")
        self._get_temperature: _Ask = self._channel.unary_unary("/Levelzero/GetDeviceTemperature")
        self._get_indices: _Ask = self._channel.unary_unary("/Levelzero/GetIntelIndices")

    async def condition(self, bdf: str) -> Condition:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        answer = pb.DeviceHealth()
        await self._ask("GetDeviceHealth", self._get_health, pb.DeviceId(bdfAddress=bdf), answer)
        return Condition(answer.memory_ok, answer.bus_ok, answer.soc_ok, _fault(answer.error))

    async def temperatures(self, bdf: str) -> Temperatures:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        answer = pb.DeviceTemperature()
        await self._ask("GetDeviceTemperature", self._get_temperature, pb.DeviceId(bdfAddress=bdf), answer)
        return Temperatures(getattr(answer, "global"), answer.gpu, answer.memory, _fault(answer.error))

    async def indices(self) -> list[int]:
        """The positions of Intel's devices among all that Level-Zero sees, ascending. Raises `LevelZeroError`."""
        answer = pb.DeviceIndices()
        await self._ask("GetIntelIndices", self._get_indices, pb.GetIntelIndicesMessage(), answer)
        found = sorted(set(answer.indices))
        if len(found) > MAX_INDICES:
            raise self._failed("GetIntelIndices", f"names {len(found)} devices, expected at most {MAX_INDICES}")
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

    async def _ask(self, call: str, ask: _Ask, request: Message, answer: Message) -> None:
        """Fills `answer` in."""
        try:
            answer.ParseFromString(await ask(request.SerializeToString(), timeout=self._deadline))
        except grpc.aio.AioRpcError as error:
            raise self._failed(call, explained(error)) from None
        except DecodeError:
            raise self._failed(call, f"the answer is not a {answer.DESCRIPTOR.name} message") from None

    def _failed(self, call: str, problem: str) -> LevelZeroError:
        return LevelZeroError(f"Level-Zero service at {self._socket}: {call}: {problem}")


def _fault(error: pb.Error) -> Fault:
    return Fault(error.errorcode, " ".join(error.description.split())[:200])
