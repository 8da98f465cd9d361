"""The cost of an idle agent: processor time and wake-ups during one interval of periodic scans.

Each plugin scans exactly once in this interval. The agents run at the same time. Uevents of other events on the machine
are not delivered to them.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct

from accelplane.node.settings import Settings
from accelplane.plugins.gpu.health import LEVELZERO_SOCKET
from accelplane.simulate.levelzero import LevelZeroService
from benchmarks.agent import PROGRAM, NodeSetup, gpu_npu_node, health_node, large_node, ordinary_node, registered_agent
from benchmarks.figures import Figure, Result, Scale, median

_SETTLE_SECONDS, _START_INTERVAL = 5, 7
# A network namespace of a user namespace other than the initial one receives no uevents of devices (Linux 4.18).
_ISOLATION = ("unshare", "--user", "--map-root-user", "--net")


class Idle(Struct, frozen=True):
    """Averages per minute: processor time in ms, that of the main thread, and voluntary context switches."""

    cpu: float
    main: float
    switches: float


def measure(scale: Scale) -> Result:
    seconds = scale.of(int(Settings().safety_interval), 10)
    prefix = isolation()
    cards, health, ordinary, large = asyncio.run(_run_agents(scale.of(3, 1), seconds, prefix))
    return Result(
        figures=(
            *_figures("", cards, {"Go GPU plugin": 18, "seven Go plugins": 60}),
            *_figures("health management: ", health, {}, budget=25),
            *_figures("all families: ", ordinary, {"seven Go plugins": 60}),
            *_figures("all families, large node: ", large, {"seven Go plugins": 60}),
        ),
        notes=(
            f"over {seconds} s, {_SETTLE_SECONDS} s after registration",
            f"the agents run at the same time and are started every {_START_INTERVAL} s",
            "no uevents reach the agents" if prefix else "other uevents of the machine wake the agents",
        ),
    )


def _figures(prefix: str, runs: Sequence[Idle], peers: Mapping[str, float], *, budget: float = 6) -> Sequence[Figure]:
    return (
        median(f"{prefix}processor time per minute", [run.cpu for run in runs], "ms", budget=budget, peers=peers),
        median(f"{prefix}processor time per minute, main thread", [run.main for run in runs], "ms"),
        median(f"{prefix}voluntary context switches per minute", [run.switches for run in runs], ""),
    )


async def _run_agents(count: int, seconds: int, prefix: Sequence[str]) -> Iterator[Sequence[Idle]]:
    setups = [make for make in (gpu_npu_node, health_node, ordinary_node, large_node) for _ in range(count)]
    runs = await asyncio.gather(*(_idle(make, place, seconds, prefix) for place, make in enumerate(setups)))
    return (runs[first : first + count] for first in range(0, len(runs), count))


async def _idle(
    make: Callable[[], AbstractContextManager[NodeSetup]], place: int, seconds: int, prefix: Sequence[str]
) -> Idle:
    # The agents scan at different times: hyper-threads of one core slow each other down.
    await asyncio.sleep(_START_INTERVAL * place)
    with make() as setup:
        service = LevelZeroService(f"{setup.root}{LEVELZERO_SOCKET}") if setup.config else contextlib.nullcontext()
        async with service, registered_agent(setup, program=(*prefix, *PROGRAM)) as (agent, _kubelet):
            await asyncio.sleep(_SETTLE_SECONDS)
            cpu, main, switches = agent.cpu_seconds(), agent.schedstat_seconds(), agent.voluntary_switches()
            await asyncio.sleep(seconds)
            agent.check()
            share = 60 / seconds
            return Idle(
                (agent.cpu_seconds() - cpu) * share * 1e3,
                (agent.schedstat_seconds() - main) * share * 1e3,
                (agent.voluntary_switches() - switches) * share,
            )


def isolation() -> Sequence[str]:
    """The command before another one that receives no uevents, empty if that is not possible."""
    try:
        possible = subprocess.run((*_ISOLATION, "true"), stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return ()
    return _ISOLATION if possible else ()
