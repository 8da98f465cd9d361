"""The runner of one plugin, without an agent."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from accelplane.devices import Device
from accelplane.host import Host
from accelplane.host.blocking import SerialThread
from accelplane.node.allocations import AllocationReader
from accelplane.node.context import PluginContext
from accelplane.node.runner import PluginRunner
from accelplane.node.settings import Settings
from accelplane.node.watcher import Watcher
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config


class MeterConfig(Config, frozen=True, kw_only=True):
    scale: int = 1


class Meters(Plugin[MeterConfig]):
    """Has a background task."""

    namespace = "meters.example.com"
    config_type = MeterConfig

    def scan(self, host: Host) -> list[Device]:
        return []

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        await asyncio.Event().wait()


async def test_a_runner_that_is_reconfigured_and_cancelled_before_it_runs_leaves_no_task(tmp_path: Path) -> None:
    settings = Settings(kubelet_dir=str(tmp_path))
    context = PluginContext("meters", Meters(), settings)
    allocations = AllocationReader(settings)
    runner = PluginRunner(
        context, Watcher(), allocations, lambda _error: None, thread=SerialThread(), turn=asyncio.Lock()
    )
    task = asyncio.create_task(runner.run())
    runner.reconfigure(Meters(MeterConfig(scale=2)), settings)
    task.cancel()
    await asyncio.wait((task,))
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await allocations.close()
