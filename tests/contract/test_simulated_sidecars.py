"""The simulated Level-Zero service over a real socket: its responses equal those of the real one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from accelplane.gpuservices import levelzero_pb2
from accelplane.simulate.levelzero import LevelZeroService

OPTIONS = (("grpc.default_authority", "localhost"),)
BDF = "0000:03:00.0"
DEADLINE = 20.0

ANSWERS: dict[str, type[Message]] = {
    "GetDeviceHealth": levelzero_pb2.DeviceHealth,
    "GetDeviceTemperature": levelzero_pb2.DeviceTemperature,
    "GetIntelIndices": levelzero_pb2.DeviceIndices,
    "GetDeviceMemoryAmount": levelzero_pb2.DeviceMemoryAmount,
}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LevelZeroService]:
    async with LevelZeroService(tmp_path / "var/lib/levelzero/server.sock") as service:
        yield service


async def ask(
    service: LevelZeroService, method: str, request: Message | None = None, deadline: float = DEADLINE
) -> Message:
    async with grpc.aio.insecure_channel(f"unix:{service.socket}", OPTIONS) as channel:
        call = channel.unary_unary(
            f"/Levelzero/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=ANSWERS[method].FromString,
        )
        default = levelzero_pb2.DeviceId(bdfAddress=BDF)
        return await call(default if request is None else request, timeout=deadline)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


async def health(service: LevelZeroService) -> tuple[bool, bool, bool]:
    answer = await ask(service, "GetDeviceHealth")
    return answer.memory_ok, answer.bus_ok, answer.soc_ok


async def temperatures(service: LevelZeroService) -> tuple[float, float, float]:
    answer = await ask(service, "GetDeviceTemperature")
    return getattr(answer, "global"), answer.gpu, answer.memory


async def test_all_parts_of_a_device_are_ok_by_default(service: LevelZeroService) -> None:
    assert await health(service) == (True, True, True)
    service.set_health(BDF, memory=False)
    assert await health(service) == (False, True, True)
    service.set_health(BDF, bus=False, soc=False)
    assert await health(service) == (True, False, False)
    service.set_health(BDF)
    assert await health(service) == (True, True, True)


async def test_temperatures_and_memory_are_those_set(service: LevelZeroService) -> None:
    service.set_temperature(BDF, overall=50.5, gpu=101.25, memory=-999.0)
    service.set_memory(BDF, 2**40)
    assert await temperatures(service) == (50.5, 101.25, -999.0)
    assert (await ask(service, "GetDeviceMemoryAmount")).memory_size == 2**40
    service.set_health(BDF, memory=False)
    assert await temperatures(service) == (50.5, 101.25, -999.0)


async def test_indices_are_those_set(service: LevelZeroService) -> None:
    service.indices = [0, 2]
    answer = await ask(service, "GetIntelIndices", levelzero_pb2.GetIntelIndicesMessage())
    assert list(answer.indices) == [0, 2]


@pytest.mark.parametrize("method", ANSWERS)
async def test_every_response_has_an_error_which_is_empty_for_success(service: LevelZeroService, method: str) -> None:
    answer = await ask(service, method)
    assert answer.HasField("error")
    assert (answer.error.errorcode, answer.error.description) == (0, "")
    assert service.calls == {method: 1}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0x70000001, "device lost (0x70000001)"),
        (0x1, "not ready (0x1)"),
        (0x7FFFFFFE, "unknown (0x7FFFFFFE)"),
        (0x1234ABCD, "not known (0x1234ABCD)"),
    ],
)
async def test_failures_carry_the_code_and_its_text(service: LevelZeroService, code: int, text: str) -> None:
    service.fail(code)
    for method in ANSWERS:
        answer = await ask(service, method)
        assert (answer.error.errorcode, answer.error.description) == (code, text)
    assert await health(service) == (True, True, True)
    assert await temperatures(service) == (-999.0, -999.0, -999.0)
    service.fail(0)
    assert (await ask(service, "GetDeviceHealth")).error.errorcode == 0


async def test_one_device_can_fail_alone(service: LevelZeroService) -> None:
    service.fail(0x70000001, "0000:99:00.0")
    other = levelzero_pb2.DeviceId(bdfAddress="0000:99:00.0")
    assert (await ask(service, "GetDeviceHealth", other)).error.errorcode == 0x70000001
    assert (await ask(service, "GetDeviceHealth")).error.errorcode == 0


async def test_an_unknown_device_of_the_service_is_an_error_with_default_values(tmp_path: Path) -> None:
    async with LevelZeroService(tmp_path / "s.sock", bdfs=["0000:99:00.0"]) as service:
        answer = await ask(service, "GetDeviceMemoryAmount")
        assert (answer.memory_size, answer.error.errorcode) == (0, 0x7FFFFFFE)
        assert await health(service) == (True, True, True)
        service.set_health(BDF, memory=False)
        assert await health(service) == (False, True, True)


async def test_a_hanging_service_responds_after_resume(service: LevelZeroService) -> None:
    service.hang()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(service, "GetDeviceHealth", deadline=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    waiting = asyncio.create_task(ask(service, "GetDeviceHealth"))
    await until(lambda: service.calls["GetDeviceHealth"] == 2)
    assert not waiting.done()
    service.resume()
    assert (await waiting).memory_ok


async def test_a_service_can_stop_with_open_calls_and_start_again(service: LevelZeroService) -> None:
    service.hang()
    waiting = asyncio.create_task(ask(service, "GetDeviceHealth"))
    await until(lambda: service.calls["GetDeviceHealth"] == 1)
    await service.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await waiting
    assert not Path(service.socket).exists()
    service.resume()
    await service.start()
    assert await health(service) == (True, True, True)


async def test_a_socket_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.sock").mkdir()
    with pytest.raises(RuntimeError):
        await LevelZeroService(tmp_path / "s.sock").start()
