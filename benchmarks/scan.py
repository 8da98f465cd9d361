"""The time of a scan of a large node by family, and of a complete scan cycle of the agent.

A scan cycle runs after an event that affects all plugins, and periodically: it prepares the hardware, scans in a
thread, compares the inventory with the published one, and updates CDI files. Nothing has changed.
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
from benchmarks.agent import NodeSetup, gpu_npu_node, large_node
from benchmarks.figures import Figure, Result, Scale, median

_CARDS, _SHARES = 64, 8
_PAUSE = 0.5  # the agent limits the rate of scans
_FOUND = {"qat": 128, "dsa": 64, "iaa": 64, "dlb": 4, "sgx": 220}
_NAMES = {
    "qat": "8 QAT with 16 virtual functions each",
    "dsa": "8 DSA with 8 work queues each",
    "iaa": "8 IAA with 8 work queues each",
    "dlb": "4 DLB",
    "sgx": "SGX, 110 IDs of each kind",
}


def measure(scale: Scale) -> Result:
    count = scale.of(50, 2)
    with gpu_npu_node(cards=_CARDS, npus=0) as setup:
        cards = _times(GpuPlugin(GpuConfig(shared_dev_num=_SHARES)), setup, count, expected=_CARDS * _SHARES)
    with large_node() as setup:
        families = {name: _times(plugin, setup, count, _FOUND[name]) for name, plugin in _offload_plugins().items()}
        cycles = asyncio.run(_scan_cycles(setup, scale.of(30, 1)))
    return Result(
        figures=(
            median(f"scan of {_CARDS} cards shared {_SHARES} ways", cards, "ms", budget=15),
            *(median(f"scan of {_NAMES[name]}", times, "ms") for name, times in families.items()),
            median("scan of these five", [sum(times) for times in zip(*families.values(), strict=True)], "ms"),
            cycles,
        ),
        notes=("scan cycle: processor time of one cycle of each of the seven plugins; 4 cards, an NPU, 64 QAT IDs",),
    )


def _offload_plugins() -> dict[str, Plugin[Config]]:
    """The plugins of the five families with default options, except QAT, which publishes all virtual functions."""
    plugins: dict[str, Plugin[Config]] = {name: cls() for name, cls in installed(tuple(_FOUND)).types.items()}
    plugins["qat"] = QatPlugin(QatConfig(max_num_devices=_FOUND["qat"]))
    return {name: plugins[name] for name in _FOUND}


def _times(plugin: Plugin[Config], setup: NodeSetup, count: int, expected: int) -> list[float]:
    found = len(scan(plugin, Host(setup.root)))
    assert found == expected, f"{plugin.namespace}: {found} devices found, expected {expected}"
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        scan(plugin, Host(setup.root))
        times.append((time.perf_counter() - start) * 1e3)
    return times


async def _scan_cycles(setup: NodeSetup, count: int) -> Figure:
    """Scan cycles of an agent in this process, without a kubelet."""
    settings = Settings(root=setup.root, kubelet_dir=setup.kubelet_dir, cdi_dir=f"{setup.directory}/cdi")
    agent = Agent(settings, {name: cls() for name, cls in installed(setup.plugins).types.items()})
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
        # Uevents of this machine may have caused a second scan.
        if {runner.scan.count - before[name] for name, runner in agent.runners.items()} == {1}:
            times.append(took)
    agent.stop()
    await running
    return median("scan cycle of all seven", times, "ms")
