"""Repeated kubelet restarts with running pods: time until all resources are registered, and lost devices."""

import asyncio
import time

from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from benchmarks.agent import GPU, NPU, gpu_npu_node, registered_agent
from benchmarks.figures import Result, Scale, median, single
from benchmarks.syscall_timestamps import SyscallTimestamps

_WARM_UP = 10


def measure(scale: Scale) -> Result:
    return asyncio.run(_restarts(scale.of(100, 12)))


async def _restarts(count: int) -> Result:
    times: list[float] = []
    unchanged = 0
    with gpu_npu_node() as setup:
        async with registered_agent(setup) as (agent, kubelet):
            for number in range(2):
                await kubelet.run_pod(Pod(f"gpu{number}", containers={"work": {GPU: 1}}))
            await kubelet.run_pod(Pod("npu", containers={"work": {NPU: 1}}))
            expected = _devices_in_use(kubelet)
            socket = f"{kubelet.plugin_directory}/kubelet.sock"
            timestamps = SyscallTimestamps(socket)
            before = agent.memory()
            for number in range(1, count + 1):
                await kubelet.stop()
                await asyncio.sleep(0.1)
                await kubelet.start()
                await kubelet.until(setup.all_allocatable, 30)
                times.append((time.perf_counter() - timestamps.at[socket]) * 1e3)
                unchanged += _devices_in_use(kubelet) == expected
                if number == _WARM_UP:
                    before = agent.memory()
            after = agent.memory()
            calls = len(kubelet.registrations)
    return Result(
        figures=(
            median("all resources registered again", times, "ms"),
            single("slowest", max(times), "ms", samples=count),
            single("restarts after which a pod lost devices", count - unchanged, "", samples=count, budget=0),
            single("registrations per restart and resource", (calls - 2) / (2 * count), "", samples=count),
            single(f"growth of anonymous memory since restart {_WARM_UP}", after.anonymous - before.anonymous, "MiB"),
        ),
        notes=(
            "from the creation of kubelet.sock; includes the embedded kubelet's own work",
            "memory grows slightly until about restart 200",
        ),
    )


def _devices_in_use(kubelet: EmbeddedKubelet) -> dict[str, tuple[str, ...]]:
    return {name: status.in_use for name, status in kubelet.resources().items()}
