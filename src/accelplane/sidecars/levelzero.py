"""Client of the Level-Zero service, which reads GPU health and temperatures in a process of its own.

Contract: proto/levelzero.proto. The service answers every call; what it could not read comes with an error code and a
harmless value (true, -999.0), so that a good part of an answer is not lost with a bad one.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from google.protobuf.message import Message

from accelplane import rpc
from accelplane.sidecars import levelzero_pb2 as pb

MAX_INDICES = 1024
_MAX_MESSAGE = 1024 * 1024
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0

_Answer = TypeVar("_Answer", bound=Message)


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
    """One connection to the service, made anew when it was lost. Calls end within `deadline` seconds."""

    def __init__(self, socket: str, deadline: float = 2.0) -> None:
        self._socket = socket
        self._deadline = deadline
        self._channel = rpc.Channel(socket, max_message=_MAX_MESSAGE)
        self._gone = asyncio.Event()
        self._gone.set()
        self._pause = _FIRST_PAUSE

    async def condition(self, bdf: str) -> Condition:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        answer = await self._ask("GetDeviceHealth", pb.DeviceId(bdfAddress=bdf), pb.DeviceHealth)
        return Condition(answer.memory_ok, answer.bus_ok, answer.soc_ok, _fault(answer.error))

    async def temperatures(self, bdf: str) -> Temperatures:
        """Of the device at a PCI address. Raises `LevelZeroError`."""
        answer = await self._ask("GetDeviceTemperature", pb.DeviceId(bdfAddress=bdf), pb.DeviceTemperature)
        return Temperatures(getattr(answer, "global"), answer.gpu, answer.memory, _fault(answer.error))

    async def indices(self) -> list[int]:
        """The positions of Intel's devices among all that Level-Zero sees, ascending. Raises `LevelZeroError`."""
        answer = await self._ask("GetIntelIndices", pb.GetIntelIndicesMessage(), pb.DeviceIndices)
        found = sorted(set(answer.indices))
        if len(found) > MAX_INDICES:
            raise self._failed("GetIntelIndices", f"names {len(found)} devices, expected at most {MAX_INDICES}")
        return found

    async def follow(self, returned: Callable[[], None]) -> NoReturn:
        """Waits for the service when a call did not reach it, and calls `returned` when it listens. Until cancelled."""
        while True:
            await self._gone.wait()
            await asyncio.sleep(self._pause)
            # Goes back with an answer only: a service that takes connections and drops them must not be hunted.
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            if self._gone.is_set() and await _listens(self._socket):
                self._gone.clear()
                returned()

    def close(self) -> None:
        self._channel.close()

    async def _ask(self, call: str, request: Message, answer_type: type[_Answer]) -> _Answer:
        try:
            answer = await self._channel.call(f"/Levelzero/{call}", request, answer_type, deadline=self._deadline)
        except rpc.RpcError as error:
            if error.code == "UNAVAILABLE":
                self._gone.set()
            raise self._failed(call, str(error)) from None
        self._gone.clear()
        self._pause = _FIRST_PAUSE
        return answer

    def _failed(self, call: str, problem: str) -> LevelZeroError:
        return LevelZeroError(f"Level-Zero service at {self._socket}: {call}: {' '.join(problem.split())[:300]}")


def _fault(error: pb.Error) -> Fault:
    return Fault(error.errorcode, " ".join(error.description.split())[:200])


async def _listens(socket: str) -> bool:
    """Whether somebody takes connections at the socket. Calls of the service itself may be costly."""
    try:
        _reader, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    writer.close()
    return True
