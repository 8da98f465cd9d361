"""What may change while a task of the agent waits: plugins are disabled, hooks end early, the kubelet restarts."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest
from gadgets import Table, gadgets
from scripted import Setup, Shelf, ShelfConfig
from threadlimit import ThreadLimit
from trees import write
from virtualtime import Threads, VirtualTimeLoop, controlled, in_virtual_time

from accelplane import rpc
from accelplane.devices import CdiDevice, Device
from accelplane.host import Host
from accelplane.kubelet import checkpoint, podresources
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.node import allocations
from accelplane.node.agent import Agent
from accelplane.node.allocations import AllocationReader
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.publishers.cdi_directory import CdiWriteError
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.watcher import Watcher
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

pytestmark = pytest.mark.memory

THING = "a.example.com/thing"
SOCKET = "a.example.com-thing.sock"


def settings_for(directory: str) -> Settings:
    return Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi")


@in_virtual_time()
async def test_a_service_whose_work_is_cancelled_is_restarted(tmp_path: Path) -> None:
    runs: list[int] = []

    async def service(_watcher: Watcher) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise asyncio.CancelledError  # as of a task of its own that something else has cancelled
        await asyncio.Event().wait()

    agent = Agent(settings_for(str(tmp_path)), {}, services={"labels": service})
    task = asyncio.create_task(agent.run())
    await asyncio.sleep(60)
    agent.stop()
    await task
    assert len(runs) == 2


class EndsEarly(Shelf):
    """Its background task ends by a cancellation the first time."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "a", ShelfConfig(label="new"))
        self.runs = 0

    async def background(self, host: Host, request_scan: object) -> None:
        self.runs += 1
        if self.runs == 1:
            raise asyncio.CancelledError
        await asyncio.Event().wait()


def test_a_background_task_whose_work_is_cancelled_is_restarted() -> None:
    setup = Setup()
    plugin = EndsEarly(setup)
    setup.enabled["a"] = plugin
    setup.reload()
    setup.complete_work()
    setup.close()
    assert plugin.runs == 2


class Stuck(Plugin[Config]):
    """Its first scan waits for a service that does not answer."""

    namespace = "stuck.example.com"

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    async def refresh(self, host: Host) -> None:
        self.waiting.set()
        await asyncio.Event().wait()

    def scan(self, host: Host) -> list[object]:  # type: ignore[override]
        return []


class LongName(Table):
    namespace = f"{'x' * 90}.example.com"


async def test_an_agent_that_can_serve_nothing_ends_also_if_a_plugin_is_disabled_during_its_first_scan(
    tmp_path: Path, directory: str
) -> None:
    config, stuck = tmp_path / "etc" / "config", Stuck()
    config.parent.mkdir()
    config.write_text("")
    long: dict[str, Plugin[Config]] = {"long": LongName(gadgets("a"))}
    agent = Agent(
        settings_for(directory),
        {**long, "stuck": stuck},
        config_file=str(config),
        reload=lambda: (settings_for(directory), long),
    )
    task = asyncio.create_task(agent.run())
    await stuck.waiting.wait()
    config.write_text("changed")
    async with asyncio.timeout(60):
        with pytest.raises(ConfigurationError, match="a socket path of"):
            await task


class Cards(Plugin[Config]):
    """Owns the CDI files of one kind."""

    namespace = "cards.example.com"
    cdi_kinds = ("cards.example.com/card",)

    def scan(self, host: Host) -> list[Device]:
        return []


def test_a_device_that_returns_while_its_stale_cdi_file_is_removed_has_a_cdi_file(tmp_path: Path) -> None:
    loop, threads = VirtualTimeLoop(), Threads()
    settings = settings_for(str(tmp_path))
    card = Device(resource="card", id="card0", cdi=CdiDevice(kind=Cards.cdi_kinds[0], name="card0", env=("CARD=0",)))
    (tmp_path / "device-plugins").mkdir()
    checkpoint.write_checkpoint(settings.sockets_dir, checkpoint.Checkpoint((), {}))  # no container holds a device
    with contextlib.closing(loop), controlled(loop, threads):
        publisher = CdiPublisher(PluginContext("cards", Cards(), settings), AllocationReader(settings))
        loop.run(publisher.publish([card], [card]))
        loop.run(publisher.publish([], []))
        threads.immediate = False
        pruning = loop.create_task(publisher.prune())
        for work in ("prune", "_from_checkpoint"):
            loop.step(10)
            assert work in threads.running[0].work.__qualname__
            threads.deliver()
        loop.step(10)
        assert len(threads.running) == 1  # the removal
        publishing = loop.create_task(publisher.publish([card], [card]))
        loop.step(10)
        while threads.running:
            threads.deliver()
            loop.step(10)
        assert pruning.done()
        assert publishing.done()
    assert [path.name for path in (tmp_path / "cdi").iterdir()] == ["cards.example.com-card-card0.yaml"]


async def test_at_the_limit_of_threads_all_ids_stay_and_cdi_files_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(str(tmp_path))
    card = CdiDevice(kind=Cards.cdi_kinds[0], name="card0", env=("CARD=0",))
    device = Device(resource="card", id="card0", cdi=card)
    reader = AllocationReader(settings)
    publisher = CdiPublisher(PluginContext("cards", Cards(), settings), reader)
    ThreadLimit(monkeypatch, failures=4)
    assert (await reader.read(0.0)).record == "unreadable"
    assert await publisher.publish([device], [device])
    await publisher.prune()
    assert publisher.needs_prune
    with pytest.raises(CdiWriteError, match=r"cannot write .*card0\.yaml: can't start new thread"):
        await publisher.ensure(card)
    assert await publisher.publish([device], [device])
    assert publisher.directory.is_current(card)
    assert caplog.messages == [
        "cards: CDI files not written: can't start new thread; each is written when a container gets its device"
    ]


@in_virtual_time(allocations)
async def test_without_a_readable_checkpoint_no_id_is_held_if_the_kubelet_has_named_no_pods_for_two_minutes(
    tmp_path: Path,
) -> None:
    settings = settings_for(str(tmp_path))
    write(tmp_path / "device-plugins" / checkpoint.FILE_NAME, "not JSON")
    socket_file = write(tmp_path / "pod-resources/kubelet.sock", "")
    reader = AllocationReader(settings)

    async def record(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return (await reader.read(allocations.time.monotonic())).record

    with patch.object(
        podresources.PodResources, "list_holders", AsyncMock(return_value=podresources.NodeHolders((), ()))
    ):
        assert await record(1) == "unreadable"
        assert await record(119) == "unreadable"
        assert await record(2) == "read"
        os.utime(socket_file, (1, 1))  # of a kubelet that has been restarted
        assert await record(1) == "unreadable"
        assert await record(121) == "read"


async def test_the_first_reading_of_a_plugin_does_not_wait_for_a_kubelet_that_hangs(tmp_path: Path) -> None:
    settings = settings_for(str(tmp_path))
    for name in (settings.pod_resources_socket, settings.sockets_dir):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(settings.sockets_dir).mkdir()
    holding = checkpoint.Holding("uid", "main", "cards.example.com/card", {-1: ("card0",)}, b"")
    checkpoint.write_checkpoint(settings.sockets_dir, checkpoint.Checkpoint((holding,)))
    allocations = AllocationReader(settings)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(settings.pod_resources_socket)
        hanging.listen()
        hanging.setblocking(False)
        of_another_plugin = asyncio.create_task(allocations.read(time.monotonic()))
        connection, _ = await asyncio.get_running_loop().sock_accept(hanging)
        with connection:
            first = await allocations.read(time.monotonic(), ask_kubelet=False)
            assert not of_another_plugin.done()
    assert (first.record, set(first.held)) == ("read", {("cards.example.com/card", "card0")})
    of_another_plugin.cancel()
    await asyncio.wait((of_another_plugin,))
    await allocations.close()


# The kubelet.


@pytest.fixture
def setup() -> Iterator[Setup]:
    """With one device listed."""
    instance = Setup()
    instance.plug("a", "u0", "d0")
    instance.complete_work()
    yield instance
    instance.close()


def test_a_socket_that_is_deleted_while_register_is_unanswered_is_created_and_registered_again(setup: Setup) -> None:
    setup.kubelet.answers_register = False
    for _ in range(3):
        before = setup.kubelet.registrations
        (Path(setup.kubelet.directory) / SOCKET).unlink()
        setup.advance(1)
        assert setup.kubelet.registrations == before + 1
    setup.kubelet.answers_register = True
    (Path(setup.kubelet.directory) / SOCKET).unlink()
    setup.advance(1)
    setup.check_rest()
    assert setup.kubelet.lists[THING] == {"d0": True}


def test_a_kubelet_that_restarts_while_register_is_unanswered_gets_the_list(setup: Setup) -> None:
    setup.kubelet.answers_register = False
    setup.restart_kubelet()
    setup.advance(1)
    setup.kubelet.answers_register = True
    setup.restart_kubelet()
    setup.advance(1)
    setup.check_rest()
    assert setup.kubelet.lists[THING] == {"d0": True}


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16, 32])
def test_restarts_of_the_kubelet_in_quick_succession_end_with_the_list(setup: Setup, steps: int) -> None:
    for _ in range(3):
        setup.restart_kubelet()
        setup.step(steps)
    setup.advance(2)
    setup.check_rest()
    assert setup.kubelet.lists[THING] == {"d0": True}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21])
@pytest.mark.parametrize("method", ["GetDevicePluginOptions", "Allocate"])
def test_a_call_during_the_shutdown_is_answered_or_fails_as_unavailable(setup: Setup, method: str, steps: int) -> None:
    async def call() -> str:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["d0"])])
        messages = {
            "GetDevicePluginOptions": (pb.Empty(), pb.DevicePluginOptions),
            "Allocate": (request, pb.AllocateResponse),
        }
        async with rpc.Channel(f"{setup.kubelet.directory}/{SOCKET}") as plugin:
            try:
                await plugin.call(f"/v1beta1.DevicePlugin/{method}", *messages[method], deadline=60)
            except rpc.RpcError as error:
                return error.code
        return "OK"

    calling = setup.loop.create_task(call())
    setup.step(steps // 2)
    setup.agent.stop()
    setup.step(steps)
    setup.advance(5)
    assert calling.result() in ("OK", "UNAVAILABLE")


def test_a_machine_that_was_suspended_for_days_keeps_its_list(setup: Setup) -> None:
    setup.unplug("a", "u0", "d0")
    setup.plug("a", "u0", "d1")
    setup.step(20)
    setup.loop.now += 10 * 24 * 3600
    setup.set_health("u0", good=False)
    setup.complete_work()
    setup.check_rest()
    assert setup.kubelet.lists[THING] == {"d1": False}
