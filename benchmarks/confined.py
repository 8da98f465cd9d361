"""The agent in a memory cgroup of 30 MiB during allocations, hot-plug and a kubelet restart.

With GPUs and NPUs only, and with all families. Each is measured twice: with program files in the page cache that are
charged to another cgroup, as for the second container of an image on a node, and with private files, as for the first.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from benchmarks.agent import GPU, NPU, PROGRAM, NodeSetup, gpu_npu_node, large_node, registered_agent
from benchmarks.figures import Figure, Result, Scale, single
from benchmarks.memory_cgroup import CgroupUnavailable, MemoryCgroup, memory_cgroup
from benchmarks.uncached_copy import UncachedCopy, copy_uncached

_LIMIT_MIB = 30


def measure(scale: Scale) -> Result:
    installed = UncachedCopy(PROGRAM, {})
    figures: list[Figure] = []
    for prefix, make in (("", gpu_npu_node), ("all families, ", large_node)):
        try:
            figures += _run(scale, f"{prefix}files shared", installed, make)
        except CgroupUnavailable as error:
            return Result(skipped=str(error))
        # /var/tmp is on a disk even if /tmp is not. Pages of a tmpfs cannot be evicted.
        with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as directory:
            figures += _run(scale, f"{prefix}private files", copy_uncached(f"{directory}/python"), make)
    pods, cycles = scale.of(200, 20), scale.of(50, 5)
    return Result(
        figures=figures,
        notes=(
            f"workload: {pods} allocations, a card unplugged and plugged in {cycles} times, a kubelet restart",
            "at its limit a cgroup evicts file pages, which are then read again: the workload takes longer",
            "not every kernel counts how often a version 1 cgroup reached its limit",
        ),
    )


def _run(
    scale: Scale, name: str, program: UncachedCopy, make: Callable[[], AbstractContextManager[NodeSetup]]
) -> Sequence[Figure]:
    """Raises `CgroupUnavailable`, and `RuntimeError` if the agent exits."""
    with memory_cgroup(_LIMIT_MIB * 1024 * 1024) as group, make() as setup:
        return asyncio.run(_run_workload(scale, name, program, group, setup))


async def _run_workload(
    scale: Scale, name: str, program: UncachedCopy, group: MemoryCgroup, setup: NodeSetup
) -> Sequence[Figure]:
    command = (*group.command(), *program.program)
    async with registered_agent(setup, program=command, env=program.env) as (agent, kubelet):
        start = time.perf_counter()
        await _pods(setup, kubelet, scale.of(200, 20))
        await _replug(setup, kubelet, scale.of(50, 5))
        await kubelet.restart()
        await kubelet.until(setup.all_allocatable, 30)
        seconds = time.perf_counter() - start
        agent.check()
        return _figures(name, seconds, group)


def _figures(name: str, seconds: float, group: MemoryCgroup) -> Sequence[Figure]:
    usage = group.usage()
    figures = [
        single(f"{name}: OOM kills", usage.killed, "", budget=0),
        single(f"{name}: limit reached", usage.at_limit, ""),
        single(f"{name}: anonymous charged", usage.anonymous, "MiB", budget=_LIMIT_MIB),
        single(f"{name}: files charged", usage.files, "MiB"),
        single(f"{name}: time of the workload", seconds, "s"),
    ]
    if usage.peak is not None:
        figures.append(single(f"{name}: peak charged", usage.peak, "MiB", budget=_LIMIT_MIB))
    return figures


async def _pods(setup: NodeSetup, kubelet: EmbeddedKubelet, count: int) -> None:
    requests = {GPU: 2, NPU: 1, **dict.fromkeys(setup.expected, 1)}
    for number in range(count):
        name = f"pod{number}"
        await kubelet.run_pod(Pod(name, containers={"work": requests}))
        kubelet.delete_pod(name)


async def _replug(setup: NodeSetup, kubelet: EmbeddedKubelet, count: int) -> None:
    for _ in range(count):
        setup.node.unplug("card3")
        await kubelet.until(lambda kubelet: kubelet.resources()[GPU].allocatable == 3)
        setup.node.plug_gpu()
        await kubelet.until(setup.all_allocatable)
