"""What may change while a task of the agent waits: plugins are disabled, hooks end early, the kubelet restarts."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from gadgets import Table, gadgets
from scripted import Setup, Shelf, ShelfConfig
from virtualtime import Threads, VirtualTimeLoop, controlled, in_virtual_time

from accelplane.devices import CdiDevice, Device
from accelplane.host import Host
from accelplane.kubelet import checkpoint
from accelplane.node.agent import Agent
from accelplane.node.allocations import AllocationReader
from accelplane.node.context import PluginContext
from accelplane.node.publishers.cdi import CdiPublisher
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.watcher import Watcher
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config


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
