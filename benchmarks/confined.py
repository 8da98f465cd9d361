"""The agent in a memory control group of 30 MiB, at work: pods, cards that come and go, another kubelet.

With GPUs and NPUs only, then with all families; each twice: with files that are in the page cache and charged to
another group, as on a node where a second container of the image starts, and with files of its own, as where the agent
is the first.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from benchmarks.agent import GPU, NPU, PROGRAM, World, registered, whole_world, world
from benchmarks.figures import Figure, Outcome, Scale, single
from benchmarks.fresh import Copy, copied
from benchmarks.groups import MemoryGroup, Unavailable, memory_group

_LIMIT_MIB = 30


def measure(scale: Scale) -> Outcome:
    installed = Copy(PROGRAM, {})
    figures: list[Figure] = []
    for prefix, make in (("", world), ("all families, ", whole_world)):
        try:
            figures += _at_work(scale, f"{prefix}files shared", installed, make)
        except Unavailable as error:
            return Outcome(skipped=str(error))
        # /var/tmp is on a disk also where /tmp is not; pages of a file system in memory cannot be let go.
        with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as directory:
            figures += _at_work(scale, f"{prefix}files of its own", copied(f"{directory}/python"), make)
    pods, cycles = scale.of(200, 20), scale.of(50, 5)
    return Outcome(
        figures=figures,
        notes=(
            f"survived: {pods} allocations, {cycles} times a card unplugged and plugged in, a kubelet restart",
            "at its limit a group loses pages of files, which must be read again: first the work takes longer",
            "not every kernel counts how often a group of version 1 came to its limit",
        ),
    )


def _at_work(
    scale: Scale, name: str, program: Copy, make: Callable[[], AbstractContextManager[World]]
) -> Sequence[Figure]:
    """Raises `Unavailable`, and `RuntimeError` when the agent does not survive."""
    with memory_group(_LIMIT_MIB * 1024 * 1024) as group, make() as here:
        return asyncio.run(_live(scale, name, program, group, here))


async def _live(scale: Scale, name: str, program: Copy, group: MemoryGroup, here: World) -> Sequence[Figure]:
    command = (*group.command(), *program.program)
    async with registered(here, program=command, env=program.env) as (agent, kubelet):
        start = time.perf_counter()
        await _pods(here, kubelet, scale.of(200, 20))
        await _plugging(here, kubelet, scale.of(50, 5))
        await kubelet.restart()
        await kubelet.until(here.has_everything, 30)
        took = time.perf_counter() - start
        agent.check()
        return _figures(name, took, group)


def _figures(name: str, took: float, group: MemoryGroup) -> Sequence[Figure]:
    charged = group.charged()
    figures = [
        single(f"{name}: ended for want of memory", charged.killed, "", budget=0),
        single(f"{name}: came to the limit", charged.at_limit, ""),
        single(f"{name}: anonymous charged", charged.anonymous, "MiB", budget=_LIMIT_MIB),
        single(f"{name}: files charged", charged.files, "MiB"),
        single(f"{name}: time that the work took", took, "s"),
    ]
    if charged.peak is not None:
        figures.append(single(f"{name}: most ever charged", charged.peak, "MiB", budget=_LIMIT_MIB))
    return figures


async def _pods(here: World, kubelet: EmbeddedKubelet, count: int) -> None:
    wish = {GPU: 2, NPU: 1, **dict.fromkeys(here.more, 1)}
    for number in range(count):
        name = f"pod{number}"
        await kubelet.run_pod(Pod(name, containers={"work": wish}))
        kubelet.delete_pod(name)


async def _plugging(here: World, kubelet: EmbeddedKubelet, count: int) -> None:
    for _ in range(count):
        here.node.unplug("card3")
        await kubelet.until(lambda kubelet: kubelet.resources()[GPU].allocatable == 3)
        here.node.plug_gpu()
        await kubelet.until(here.has_everything)
