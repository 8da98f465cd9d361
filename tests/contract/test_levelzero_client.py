"""The GPU plugin with a Level-Zero service on a real socket: healthy, failing, slow, missing, restarted."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from trees import gpu_card
from waiting import until

from accelplane.devices import Device, Verdict
from accelplane.gpuservices import levelzero_pb2 as pb
from accelplane.gpuservices.levelzero import MAX_INDICES, LevelZero, LevelZeroError
from accelplane.host import Host
from accelplane.plugins import ScanError
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.gpu import health as gpu_health

GOOD = pb.DeviceHealth(memory_ok=True, bus_ok=True, soc_ok=True)
COOL = (50.0, 50.0, 50.0)


def temperatures(overall: float, gpu: float, memory: float, error: pb.Error | None = None) -> pb.DeviceTemperature:
    answer = pb.DeviceTemperature(gpu=gpu, memory=memory, error=error)
    setattr(answer, "global", overall)
    return answer


class Service:
    """A Level-Zero service whose responses a test sets, optionally by PCI address."""

    def __init__(self) -> None:
        self.health: dict[str, pb.DeviceHealth] = {}
        self.temperature: dict[str, pb.DeviceTemperature] = {}
        self.indices = pb.DeviceIndices()
        self.hanging: set[str] = set()
        self.queried: list[str] = []

    async def get_health(self, request: pb.DeviceId, context: object) -> pb.DeviceHealth:
        self.queried.append(request.bdfAddress)
        if request.bdfAddress in self.hanging:
            await asyncio.Event().wait()
        return self.health.get(request.bdfAddress, GOOD)

    async def get_temperature(self, request: pb.DeviceId, context: object) -> pb.DeviceTemperature:
        return self.temperature.get(request.bdfAddress, temperatures(*COOL))

    async def get_indices(self, request: pb.GetIntelIndicesMessage, context: object) -> pb.DeviceIndices:
        return self.indices

    @asynccontextmanager
    async def listening(self, socket: Path) -> AsyncIterator[None]:
        socket.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.aio.server()
        methods = {
            "GetDeviceHealth": grpc.unary_unary_rpc_method_handler(
                self.get_health, pb.DeviceId.FromString, pb.DeviceHealth.SerializeToString
            ),
            "GetDeviceTemperature": grpc.unary_unary_rpc_method_handler(
                self.get_temperature, pb.DeviceId.FromString, pb.DeviceTemperature.SerializeToString
            ),
            "GetIntelIndices": grpc.unary_unary_rpc_method_handler(
                self.get_indices, pb.GetIntelIndicesMessage.FromString, pb.DeviceIndices.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Levelzero", methods),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)


@pytest.fixture
def root() -> Iterator[Path]:
    """A tree with a short name: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="lz", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def socket(root: Path) -> Path:
    return root / "var/lib/levelzero/server.sock"


@asynccontextmanager
async def running(
    plugin: GpuPlugin, root: Path, request_scan: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    task = asyncio.create_task(plugin.background(Host(root), request_scan))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Cards:
    """A plugin with health management, and its cards."""

    def __init__(self, root: Path, **options: object) -> None:
        self.host = Host(root)
        self.plugin = GpuPlugin(GpuConfig.of({"health-management": True, **options}))
        self.devices = [item for item in self.plugin.scan(self.host) if isinstance(item, Device)]

    async def verdicts(self) -> dict[str, Verdict]:
        return dict(await self.plugin.health(self.host, self.devices))


FAULT = pb.Error(errorcode=0x70010001, description="not available (0x70010001)")
LOST = pb.Error(errorcode=0x70000001, description="device lost (0x70000001)")
RESET = pb.Error(errorcode=0x70000006)
NOT_ASKED = pb.Error(errorcode=0x70020000, description="dependency unavailable (0x70020000)")


@pytest.mark.parametrize(
    ("health", "temperature", "verdict"),
    [
        (GOOD, temperatures(*COOL), Verdict("good")),
        (GOOD, temperatures(100.0, 100.0, 100.0), Verdict("good")),
        (GOOD, temperatures(40.0, 40.0, -999.0, FAULT), Verdict("good")),
        (pb.DeviceHealth(bus_ok=True, soc_ok=True), temperatures(*COOL), Verdict("bad", "memory not ok", "memory")),
        (pb.DeviceHealth(memory_ok=True), temperatures(*COOL), Verdict("bad", "bus not ok, SoC not ok", "bus")),
        (GOOD, temperatures(0.0, 101.5, 0.0), Verdict("bad", "gpu temperature 101.5 °C above 100", "temperature")),
        (GOOD, temperatures(100.9, 0.0, 0.0), Verdict("bad", "global temperature 100.9 °C above 100", "temperature")),
        (
            pb.DeviceHealth(memory_ok=True, bus_ok=True, soc_ok=True, error=RESET),
            temperatures(*COOL),
            Verdict("bad", "error 0x70000006", "wedged"),
        ),
        (GOOD, temperatures(-999.0, -999.0, -999.0, LOST), Verdict("bad", "device lost (0x70000001)", "gone")),
        (
            GOOD,
            temperatures(-999.0, -999.0, -999.0, NOT_ASKED),
            Verdict("unknown", "the Level-Zero service: dependency unavailable (0x70020000)"),
        ),
        (
            pb.DeviceHealth(bus_ok=True, soc_ok=True),
            temperatures(-999.0, -999.0, -999.0, NOT_ASKED),
            Verdict("bad", "memory not ok", "memory"),
        ),
    ],
)
async def test_the_readings_of_the_service_determine_the_verdict(
    root: Path, socket: Path, health: pb.DeviceHealth, temperature: pb.DeviceTemperature, verdict: Verdict
) -> None:
    gpu_card(root, 0)
    gpu_card(root, 1)
    service = Service()
    service.health["0000:03:00.0"] = health
    service.temperature["0000:03:00.0"] = temperature
    cards = Cards(root, **{"shared-dev-num": 2, "enable-monitoring": True})
    async with service.listening(socket), running(cards.plugin, root):
        assert await cards.verdicts() == {"card0": verdict, "card1": Verdict("good")}


async def test_a_value_that_the_service_cannot_read_is_reported(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    service = Service()
    service.temperature["0000:03:00.0"] = temperatures(40.0, 40.0, -999.0, FAULT)
    cards = Cards(root)
    async with service.listening(socket), running(cards.plugin, root):
        await cards.verdicts()
    assert [note for note in cards.host.notes if "card0" in note and "not available (0x70010001)" in note]


async def test_an_overheated_card_is_bad_until_it_cooled_by_the_margin(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    service = Service()
    cards = Cards(root, **{"gpu-temp-limit": 90, "temperature-margin": 10, "health-bad-verdicts": 1})
    answers: list[str] = []
    async with service.listening(socket), running(cards.plugin, root):
        for degrees in (85.0, 91.0, 85.0, 79.0, 85.0):
            service.temperature["0000:03:00.0"] = temperatures(0.0, degrees, 0.0)
            answers.append((await cards.verdicts())["card0"].answer)
    assert answers == ["good", "bad", "bad", "good", "good"]


async def test_a_check_of_a_new_card_alone_keeps_the_temperature_state_of_others(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    service = Service()
    cards = Cards(root, **{"gpu-temp-limit": 90, "temperature-margin": 10, "health-bad-verdicts": 1})
    new_card = Device(resource="i915", id="card1-0", unit="card1", attributes={"bdf": "0000:04:00.0"})
    async with service.listening(socket), running(cards.plugin, root):
        service.temperature["0000:03:00.0"] = temperatures(0.0, 91.0, 0.0)
        assert (await cards.verdicts())["card0"].answer == "bad"
        await cards.plugin.health(cards.host, [new_card])
        service.temperature["0000:03:00.0"] = temperatures(0.0, 85.0, 0.0)
        assert (await cards.verdicts())["card0"].answer == "bad"


async def test_a_card_without_address_is_unknown(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    cards = Cards(root)
    no_address = Device(resource="i915", id="card7-0", unit="card7")
    async with Service().listening(socket), running(cards.plugin, root):
        assert (await cards.plugin.health(cards.host, [no_address]))["card7"].answer == "unknown"


async def test_without_the_service_health_is_unknown_and_the_reason_names_the_socket(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    cards = Cards(root)
    async with running(cards.plugin, root):
        verdict = (await cards.verdicts())["card0"]
    assert verdict.answer == "unknown"
    assert str(socket) in verdict.reason


async def test_a_service_that_starts_late_or_restarts_is_queried_again(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    cards = Cards(root)

    async def answer() -> str:
        return (await cards.verdicts())["card0"].answer

    async with running(cards.plugin, root):
        assert await answer() == "unknown"
        for _ in range(2):
            async with Service().listening(socket):
                assert await answer() == "good"
            assert await answer() == "unknown"


async def test_a_card_that_hangs_does_not_delay_the_queries_of_others(root: Path, socket: Path) -> None:
    for index in range(3):
        gpu_card(root, index)
    service = Service()
    service.hanging.add("0000:03:00.0")
    cards = Cards(root)
    async with service.listening(socket), running(cards.plugin, root):
        first = await cards.verdicts()
        service.hanging.clear()
        second = await cards.verdicts()
    assert {name: verdict.answer for name, verdict in first.items()} == {
        "card0": "unknown", "card1": "good", "card2": "good",
    }  # fmt: skip
    assert "DEADLINE_EXCEEDED" in first["card0"].reason
    assert {verdict.answer for verdict in second.values()} == {"good"}


async def test_a_problem_in_one_response_counts_although_the_other_call_hangs(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    service = Service()
    service.hanging.add("0000:03:00.0")
    service.temperature["0000:03:00.0"] = temperatures(101.0, 0.0, 0.0)
    cards = Cards(root)
    async with service.listening(socket), running(cards.plugin, root):
        assert await cards.verdicts() == {
            "card0": Verdict("bad", "global temperature 101.0 °C above 100", "temperature")
        }


async def test_a_health_check_after_the_plugin_has_ended_does_not_reconnect(root: Path, socket: Path) -> None:
    gpu_card(root, 0)
    service, cards = Service(), Cards(root)
    async with service.listening(socket):
        async with running(cards.plugin, root):
            assert (await cards.verdicts())["card0"].answer == "good"
        queried = len(service.queried)
        verdict = (await cards.verdicts())["card0"]
        assert (verdict.answer, len(service.queried)) == ("unknown", queried)
        assert "closed" in verdict.reason
        # An agent restarts a plugin that crashed.
        async with running(cards.plugin, root):
            await until(lambda: wait_healthy(cards))


async def wait_healthy(cards: Cards) -> bool:
    return (await cards.verdicts())["card0"].answer == "good"


async def test_a_query_on_a_lost_connection_fails_immediately(root: Path, socket: Path) -> None:
    service = Service()
    service.hanging.add("0000:03:00.0")
    client = LevelZero(str(socket), deadline=60)
    async with service.listening(socket):
        query = asyncio.create_task(client.readings(["0000:03:00.0"]))
        await until(lambda: bool(service.queried))
    (readings,) = await query
    assert "UNAVAILABLE" in readings.problem
    assert query.cancelling() == 0
    client.close()


async def test_wsl_gpus_are_the_indices_of_the_service(root: Path, socket: Path) -> None:
    service = Service()
    service.indices.indices.extend((4, 0, 4))
    plugin, host = GpuPlugin(GpuConfig(wsl=True)), Host(root)
    async with service.listening(socket), running(plugin, root):
        await plugin.refresh(host)
        found = [item.id for item in plugin.scan(host) if isinstance(item, Device)]
        service.indices = pb.DeviceIndices(error=LOST)
        await plugin.refresh(host)
        left = list(plugin.scan(host))
    assert found == ["card0-0", "card4-0"]
    assert left == []


async def test_wsl_indices_are_queried_again_until_the_service_names_a_gpu(
    root: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_health, "WSL_RETRY", 0.05)
    service = Service()
    plugin, host = GpuPlugin(GpuConfig(wsl=True)), Host(root)
    requests = asyncio.Semaphore(0)

    async def scans(count: int) -> None:
        for _ in range(count):
            async with asyncio.timeout(10):
                await requests.acquire()
            await refreshed()

    async def refreshed() -> None:
        with suppress(ScanError):
            await plugin.refresh(host)

    async with running(plugin, root, requests.release):
        await refreshed()  # no service
        await scans(2)
        async with service.listening(socket):
            await scans(2)  # no GPU
            service.indices.indices.append(1)
            await scans(1)
            assert [item.id for item in plugin.scan(host) if isinstance(item, Device)] == ["card1-0"]
            # A request may have come during the last refresh; then there are no more.
            await asyncio.sleep(0.2)
            assert requests._value <= 1
            service.indices = pb.DeviceIndices(error=LOST)
            await refreshed()
            await scans(1)


def test_the_retry_in_wsl_mode_is_as_fast_as_in_the_go_plugin() -> None:
    assert gpu_health.WSL_RETRY <= 3


async def test_in_wsl_mode_later_changes_of_the_indices_cause_scans(
    root: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_health.WSL_INTERVAL + gpu_health.WSL_RETRY <= 8
    monkeypatch.setattr(gpu_health, "WSL_RETRY", 0.05)
    monkeypatch.setattr(gpu_health, "WSL_INTERVAL", 0.05)
    service = Service()
    plugin, host = GpuPlugin(GpuConfig(wsl=True)), Host(root)
    requests = asyncio.Semaphore(0)
    async with running(plugin, root, requests.release), service.listening(socket):
        for indices in ([0], [0, 1], [], [1]):
            service.indices = pb.DeviceIndices(indices=indices)
            await plugin.refresh(host)
            assert [item.id for item in plugin.scan(host) if isinstance(item, Device)] == [
                f"card{index}-0" for index in indices
            ]
            while not requests.locked():
                await requests.acquire()
            async with asyncio.timeout(10):
                await requests.acquire()


async def test_a_refresh_without_service_fails_and_keeps_the_devices(root: Path, socket: Path) -> None:
    service = Service()
    service.indices.indices.append(1)
    plugin, host = GpuPlugin(GpuConfig(wsl=True)), Host(root)
    async with running(plugin, root):
        async with service.listening(socket):
            await plugin.refresh(host)
        with pytest.raises(ScanError, match="GetIntelIndices"):
            await plugin.refresh(host)
    assert [item.id for item in plugin.scan(host) if isinstance(item, Device)] == ["card1-0"]


async def test_too_many_indices_are_an_error(socket: Path) -> None:
    service = Service()
    service.indices.indices.extend(range(MAX_INDICES + 1))
    client = LevelZero(str(socket))
    async with service.listening(socket):
        with pytest.raises(LevelZeroError, match="1025 devices, expected at most 1024"):
            await client.indices()
        client.close()


async def test_a_response_that_cannot_be_decoded_is_an_error(socket: Path) -> None:
    async def invalid_response(request: bytes, context: object) -> bytes:
        return b"\xff" * 100

    socket.parent.mkdir(parents=True)
    server = grpc.aio.server()
    handlers = {"GetDeviceHealth": grpc.unary_unary_rpc_method_handler(invalid_response)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Levelzero", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    client = LevelZero(str(socket))
    (readings,) = await client.readings(["0000:03:00.0"])
    assert "GetDeviceHealth: INTERNAL" in readings.problem
    with pytest.raises(LevelZeroError, match="GetIntelIndices: UNIMPLEMENTED"):
        await client.indices()
    client.close()
    await server.stop(None)


async def test_a_too_long_socket_path_is_an_error_with_the_path(tmp_path: Path) -> None:
    client = LevelZero(f"{tmp_path}/{'long' * 30}.sock")
    (readings,) = await client.readings(["0000:03:00.0"])
    assert "longlong" in readings.problem
    client.close()


async def test_special_characters_in_a_path_are_not_interpreted(root: Path) -> None:
    socket = root / "a%41 b#c?.sock"
    client = LevelZero(str(socket))
    service = Service()
    socket.parent.mkdir(exist_ok=True)
    server = grpc.aio.server()
    handlers = {
        "GetIntelIndices": grpc.unary_unary_rpc_method_handler(
            service.get_indices, pb.GetIntelIndicesMessage.FromString, pb.DeviceIndices.SerializeToString
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Levelzero", handlers),))
    plain = root / "plain.sock"
    server.add_insecure_port(f"unix:{plain}")
    await server.start()
    socket.symlink_to(plain)
    assert await client.indices() == []
    client.close()
    await server.stop(None)
