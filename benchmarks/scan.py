"""What looking takes: one scan of a large node below a root, by family, and a whole look with all that follows.

A whole look is what the agent does after an event that concerns everybody, or once in five minutes: bringing hardware
into its state, the scan in a thread, the comparison with what is published, CDI files. Nothing has changed.
"""

import asyncio
import time

from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.plugins import installed
from accelplane.node.scan_loop import scan
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.gpu.config import GpuConfig
from accelplane.plugins.qat.config import QatConfig
from accelplane.plugins.qat.plugin import QatPlugin
from benchmarks.agent import World, whole_world, world
from benchmarks.figures import Figure, Outcome, Scale, median

_CARDS, _WAYS = 64, 8
_PAUSE = 0.5  # a plugin that looks often is slowed down
_FOUND = {"qat": 128, "dsa": 64, "iaa": 64, "dlb": 4, "sgx": 220}
_WORDS = {
    "qat": "8 QAT with 16 virtual functions each",
    "dsa": "8 DSA with 8 work queues each",
    "iaa": "8 IAA with 8 work queues each",
    "dlb": "4 DLB",
    "sgx": "SGX, 110 ids of each kind",
}


def measure(scale: Scale) -> Outcome:
    count = scale.of(50, 10)
    with world(cards=_CARDS, npus=0) as here:
        cards = _times(GpuPlugin(GpuConfig(shared_dev_num=_WAYS)), here, count, expected=_CARDS * _WAYS)
    with whole_world() as here:
        families = {name: _times(plugin, here, count, _FOUND[name]) for name, plugin in _offload().items()}
        looks = asyncio.run(_looks(here, scale.of(30, 2)))
    return Outcome(
        figures=(
            median(f"scan of {_CARDS} cards shared {_WAYS} ways", cards, "ms", budget=15),
            *(median(f"scan of {_WORDS[name]}", times, "ms") for name, times in families.items()),
            median("scan of all five", [sum(times) for times in zip(*families.values(), strict=True)], "ms"),
            looks,
        ),
        notes=("a whole look: processor time of one look by each of the seven, 4 cards, an NPU and 64 ids of QAT",),
    )


def _offload() -> dict[str, Plugin[Config]]:
    """The five families' plugins, as they come but for QAT, which is to publish everything."""
    plugins: dict[str, Plugin[Config]] = {name: cls() for name, cls in installed(tuple(_FOUND)).items()}
    plugins["qat"] = QatPlugin(QatConfig(max_num_devices=_FOUND["qat"]))
    return {name: plugins[name] for name in _FOUND}


def _times(plugin: Plugin[Config], here: World, count: int, expected: int) -> list[float]:
    found = len(scan(plugin, Host(here.root)))
    assert found == expected, f"{plugin.namespace}: {found} devices found, expected {expected}"
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        scan(plugin, Host(here.root))
        times.append((time.perf_counter() - start) * 1e3)
    return times


async def _looks(here: World, count: int) -> Figure:
    """Of an agent in this process, at a kubelet that is not there."""
    settings = Settings(root=here.root, kubelet_dir=here.kubelet_dir, cdi_dir=f"{here.directory}/cdi")
    agent = Agent(settings, {name: cls() for name, cls in installed(here.plugins).items()})
    running = asyncio.create_task(agent.run())
    await asyncio.sleep(1)
    times: list[float] = []
    while len(times) < count:
        before = {name: runner.scan.count for name, runner in agent.runners.items()}
        start = time.process_time()
        for runner in agent.runners.values():
            runner.scan.request()
        await asyncio.sleep(_PAUSE)
        took = (time.process_time() - start) * 1e3
        # Uevents of this machine may have made some look twice.
        if {runner.scan.count - before[name] for name, runner in agent.runners.items()} == {1}:
            times.append(took)
    agent.stop()
    await running
    return median("a whole look of all seven", times, "ms")
