"""What may change while a task of the agent waits: plugins are disabled, hooks end early, the kubelet restarts."""

import asyncio
from pathlib import Path

import pytest
from gadgets import Table, gadgets
from scripted import Setup, Shelf, ShelfConfig
from virtualtime import in_virtual_time

from accelplane.host import Host
from accelplane.node.agent import Agent
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
