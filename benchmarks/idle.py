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
from benchmarks.agent import PROGRAM, World, health_world, ordinary_world, registered, whole_world, world
from benchmarks.figures import Figure, Outcome, Scale, median

_SETTLED, _APART_BY = 5, 7
# In a network namespace of another user namespace than the first one no uevents of devices arrive (since Linux 4.18).
_APART = ("unshare", "--user", "--map-root-user", "--net")


class Idle(Struct, frozen=True):
    """What a minute takes on average: processor time in ms, the main thread's part of it, and times that it woke."""

    cpu: float
    main: float
    switches: float


def measure(scale: Scale) -> Outcome:
    seconds = scale.of(int(Settings().safety_interval), 10)
    apart = _APART if _can_be_apart() else ()
    cards, health, ordinary, large = asyncio.run(_side_by_side(scale.of(3, 1), seconds, apart))
    return Outcome(
        figures=(
            *_figures("", cards, {"Go GPU plugin": 18, "seven Go plugins": 60}),
            *_figures("health management: ", health, {}, budget=25),
            *_figures("all families: ", ordinary, {"seven Go plugins": 60}),
            *_figures("all families, large node: ", large, {"seven Go plugins": 60}),
        ),
        notes=(
            f"over {seconds} s, {_SETTLED} s after the registration; agents side by side, begun {_APART_BY} s apart",
            "no uevents reach the agents" if apart else "uevents of anything on the machine wake the agents",
        ),
    )


def _figures(prefix: str, runs: Sequence[Idle], peers: Mapping[str, float], *, budget: float = 6) -> Sequence[Figure]:
    return (
        median(f"{prefix}processor time a minute", [run.cpu for run in runs], "ms", budget=budget, peers=peers),
        median(f"{prefix}of it in the main thread", [run.main for run in runs], "ms"),
        median(f"{prefix}voluntary context switches a minute", [run.switches for run in runs], ""),
    )


async def _side_by_side(count: int, seconds: int, apart: Sequence[str]) -> Iterator[Sequence[Idle]]:
    worlds = [make for make in (world, health_world, ordinary_world, whole_world) for _ in range(count)]
    runs = await asyncio.gather(*(_idle(make, place, seconds, apart) for place, make in enumerate(worlds)))
    return (runs[first : first + count] for first in range(0, len(runs), count))


async def _idle(
    make: Callable[[], AbstractContextManager[World]], place: int, seconds: int, apart: Sequence[str]
) -> Idle:
    # They look again one after the other: on threads of one core each would cost the other time.
    await asyncio.sleep(_APART_BY * place)
    with make() as here:
        service = LevelZeroService(f"{here.root}{LEVELZERO_SOCKET}") if here.config else contextlib.nullcontext()
        async with service, registered(here, program=(*apart, *PROGRAM)) as (agent, _kubelet):
            await asyncio.sleep(_SETTLED)
            cpu, main, switches = agent.cpu_seconds(), agent.schedstat_seconds(), agent.voluntary_switches()
            await asyncio.sleep(seconds)
            agent.check()
            share = 60 / seconds
            return Idle(
                (agent.cpu_seconds() - cpu) * share * 1e3,
                (agent.schedstat_seconds() - main) * share * 1e3,
                (agent.voluntary_switches() - switches) * share,
            )


def _can_be_apart() -> bool:
    try:
        return subprocess.run((*_APART, "true"), stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False
