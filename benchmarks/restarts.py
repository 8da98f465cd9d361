"""A kubelet that restarts again and again while pods run: how soon all is registered, and that nothing is lost."""

import asyncio
import time

from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from benchmarks.agent import GPU, NPU, registered, world
from benchmarks.figures import Outcome, Scale, median, single
from benchmarks.syscall_timestamps import SyscallTimestamps

_SETTLED = 10


def measure(scale: Scale) -> Outcome:
    return asyncio.run(_restarts(scale.of(100, 12)))


async def _restarts(count: int) -> Outcome:
    times: list[float] = []
    kept = 0
    with world() as here:
        async with registered(here) as (agent, kubelet):
            for number in range(2):
                await kubelet.run_pod(Pod(f"gpu{number}", containers={"work": {GPU: 1}}))
            await kubelet.run_pod(Pod("npu", containers={"work": {NPU: 1}}))
            held = _held(kubelet)
            socket = f"{kubelet.plugin_directory}/kubelet.sock"
            timestamps = SyscallTimestamps(socket)
            before = agent.memory()
            for number in range(1, count + 1):
                await kubelet.stop()
                await asyncio.sleep(0.1)
                await kubelet.start()
                await kubelet.until(here.has_everything, 30)
                times.append((time.perf_counter() - timestamps.at[socket]) * 1e3)
                kept += _held(kubelet) == held
                if number == _SETTLED:
                    before = agent.memory()
            after = agent.memory()
            calls = len(kubelet.registrations)
    return Outcome(
        figures=(
            median("everything registered again", times, "ms"),
            single("the slowest time", max(times), "ms", samples=count),
            single("times that a pod lost what it held", count - kept, "", samples=count, budget=0),
            single("registrations for each restart and resource", (calls - 2) / (2 * count), "", samples=count),
            single(f"anonymous memory grown since restart {_SETTLED}", after.anonymous - before.anonymous, "MiB"),
        ),
        notes=(
            "from the moment that kubelet.sock is there again; the embedded kubelet's own work is in it",
            "memory grows by little until about restart 200 and stays there",
        ),
    )


def _held(kubelet: EmbeddedKubelet) -> dict[str, tuple[str, ...]]:
    return {name: status.in_use for name, status in kubelet.resources().items()}
