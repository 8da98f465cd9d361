"""The GPU plugin with xpumd on a real socket: its stream is open, ends, fails, and is opened again."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from trees import gpu_card
from waiting import until

from accelplane.devices import Device, Verdict
from accelplane.gpuservices import xpumd_pb2 as pb
from accelplane.gpuservices.xpumd import MAX_DEVICES, Xpumd, states_of
from accelplane.host import Host
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

BDF = "0000:03:00.0"


def device(bdf: str, *entries: pb.HealthStatus) -> pb.DeviceHealth:
    return pb.DeviceHealth(info=pb.DeviceInformation(pci=pb.PciInfo(bdf=bdf)), health=entries)


def status(severity: pb.SeverityLevel.ValueType, name: str = "memory", **texts: str) -> pb.HealthStatus:
    return pb.HealthStatus(name=name, severity=severity, **texts)


OK = status(pb.SEVERITY_LEVEL_OK)
CRITICAL = status(pb.SEVERITY_LEVEL_CRITICAL, reason="too many\n errors")


class Daemon:
    """xpumd. It streams the `messages`; a status code or None ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes | grpc.StatusCode | None] = asyncio.Queue()
        self.streams = 0

    def send(self, *devices: pb.DeviceHealth) -> None:
        self.messages.put_nowait(pb.DeviceHealthResponse(devices=devices).SerializeToString())

    async def watch(
        self, request: pb.WatchDeviceHealthRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[bytes]:
        self.streams += 1
        while (message := await self.messages.get()) is not None:
            if isinstance(message, grpc.StatusCode):
                await context.abort(message, "internal error")
            else:
                yield message

    @asynccontextmanager
    async def listening(self, socket: Path) -> AsyncIterator[None]:
        server = grpc.aio.server()
        methods = {
            "WatchDeviceHealth": grpc.unary_stream_rpc_method_handler(
                self.watch, pb.WatchDeviceHealthRequest.FromString
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("deviceinfo.DeviceInfo", methods),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)


@pytest.fixture
def root() -> Iterator[Path]:
    """A tree with a short name: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="xp", dir="/tmp"))
    gpu_card(path, 0)
    yield path
    shutil.rmtree(path)


class Cards:
    """A plugin with xpumd, and its cards."""

    def __init__(self, root: Path) -> None:
        self.socket = root / "xpumd.sock"
        self.host = Host(root)
        self.plugin = GpuPlugin(GpuConfig(xpumd_endpoint=str(self.socket), enable_monitoring=True))
        self.devices = [item for item in self.plugin.scan(self.host) if isinstance(item, Device)]
        self.requests = 0

    def request_scan(self) -> None:
        self.requests += 1

    async def verdict(self) -> Verdict:
        verdicts = await self.plugin.health(self.host, self.devices)
        assert set(verdicts) == {"card0"}
        return verdicts["card0"]

    async def until(self, answer: str) -> Verdict:
        async def given() -> bool:
            return (await self.verdict()).answer == answer

        await until(given)
        return await self.verdict()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.plugin.background(self.host, self.request_scan))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_the_last_message_determines_the_verdict(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()
    async with daemon.listening(cards.socket), cards.listening():
        daemon.send(device(BDF, OK))
        assert await cards.until("good") == Verdict("good")
        daemon.send(device(BDF, OK, CRITICAL))
        assert await cards.until("bad") == Verdict("bad", "memory critical: too many errors")
        daemon.send(device(BDF, OK))
        await cards.until("good")
    assert cards.requests == 3


async def test_only_changes_request_a_check(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()
    async with daemon.listening(cards.socket), cards.listening():
        for _ in range(5):
            daemon.send(device(BDF, OK))
        daemon.send(device(BDF, CRITICAL))
        await cards.until("bad")
    assert cards.requests == 2


async def test_a_card_without_a_message_is_unknown(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()
    async with daemon.listening(cards.socket), cards.listening():
        daemon.send(device("0000:99:00.0", OK))
        await until(lambda: cards.requests == 1)
        assert await cards.verdict() == Verdict("unknown", f"no health data available yet: {BDF}")


async def test_a_card_without_address_is_unknown(root: Path) -> None:
    cards = Cards(root)
    verdicts = await cards.plugin.health(cards.host, [Device(resource="i915", id="card7-0", unit="card7")])
    assert verdicts["card7"].answer == "unknown"


async def test_a_daemon_that_starts_late_is_connected(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()
    async with cards.listening():
        verdict = await cards.verdict()
        assert verdict.answer == "unknown"
        assert str(cards.socket) in verdict.reason
        daemon.send(device(BDF, OK))
        async with daemon.listening(cards.socket):
            await cards.until("good")


async def test_a_stream_that_fails_or_ends_makes_health_unknown_and_is_opened_again(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()
    async with daemon.listening(cards.socket), cards.listening():
        daemon.send(device(BDF, CRITICAL))
        await cards.until("bad")
        daemon.messages.put_nowait(grpc.StatusCode.INTERNAL)
        assert "INTERNAL: internal error" in (await cards.until("unknown")).reason
        daemon.send(device("0000:99:00.0", OK))
        await cards.until("bad")
        daemon.messages.put_nowait(None)
        assert "ended its stream" in (await cards.until("unknown")).reason
        assert cards.requests == 4  # the loss of a stream counts with fail-closed
    assert daemon.streams == 2


async def test_a_message_that_cannot_be_decoded_makes_health_unknown(root: Path) -> None:
    cards, daemon = Cards(root), Daemon()

    async def refused() -> bool:
        return "cannot decode the response" in (await cards.verdict()).reason

    async with daemon.listening(cards.socket), cards.listening():
        daemon.messages.put_nowait(b"\xff" * 9)
        await until(refused)
        daemon.send(device(BDF, OK))
        await cards.until("good")


async def test_a_restarted_daemon_is_connected_again(root: Path) -> None:
    cards, first, second = Cards(root), Daemon(), Daemon()
    async with cards.listening():
        async with first.listening(cards.socket):
            first.send(device(BDF, OK))
            await cards.until("good")
        await cards.until("unknown")
        second.send(device(BDF, CRITICAL))
        async with second.listening(cards.socket):
            await cards.until("bad")


@pytest.mark.parametrize(
    ("message", "states"),
    [
        ([device(BDF)], {BDF: ""}),
        ([device(BDF, status(pb.SEVERITY_LEVEL_UNKNOWN), OK)], {BDF: ""}),
        ([device(BDF, status(pb.SEVERITY_LEVEL_WARNING, "fan"))], {BDF: "fan warning"}),
        ([device(BDF, status(pb.SEVERITY_LEVEL_FAILED, "", message="dead"))], {BDF: "health failed: dead"}),
        (
            [device(BDF, CRITICAL, status(pb.SEVERITY_LEVEL_WARNING, "fan"))],
            {BDF: "memory critical: too many errors; fan warning"},
        ),
        ([device(" 0000:AF:00.0 ", OK)], {"0000:af:00.0": ""}),
        ([device("card0", CRITICAL), device("", CRITICAL), pb.DeviceHealth(health=[CRITICAL])], {}),
        ([pb.DeviceHealth(info=pb.DeviceInformation(uuid="u"), health=[CRITICAL])], {}),
    ],
)
def test_messages_have_their_states(message: list[pb.DeviceHealth], states: dict[str, str]) -> None:
    assert states_of(pb.DeviceHealthResponse(devices=message)) == states


def test_an_unknown_severity_is_unhealthy() -> None:
    later = pb.HealthStatus.FromString(b"\x10\x09")
    assert states_of(pb.DeviceHealthResponse(devices=[device(BDF, later)])) == {BDF: "health severity 9"}


async def test_invented_addresses_neither_exhaust_memory_nor_replace_known_cards(root: Path) -> None:
    daemon, client = Daemon(), Xpumd(str(root / "xpumd.sock"))
    verdicts: list[int] = []
    async with daemon.listening(root / "xpumd.sock"):
        task = asyncio.create_task(client.run(lambda: verdicts.append(1)))
        daemon.send(device(BDF, OK))
        daemon.send(*(device(f"{number:04x}:00:00.0", OK) for number in range(1, MAX_DEVICES + 10)))
        daemon.send(device(BDF, CRITICAL))
        await until(lambda: len(verdicts) == 3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert len(client.states) == MAX_DEVICES
    assert client.states[BDF]
