"""What an agent costs that has nothing to do: processor time and wake-ups while nothing happens for a minute."""

import asyncio

from benchmarks.agent import registered, world
from benchmarks.figures import Outcome, Scale, median


def measure(scale: Scale) -> Outcome:
    seconds = scale.of(60, 10)
    runs = [asyncio.run(_minute(seconds)) for _ in range(scale.of(3, 1))]
    return Outcome(
        figures=(
            median(
                "processor time a minute",
                [cpu for cpu, _, _ in runs],
                "ms",
                budget=6,
                peers={"Go GPU plugin": 18, "seven Go plugins": 60},
            ),
            median("of it in the main thread", [main for _, main, _ in runs], "ms"),
            median("voluntary context switches a minute", [switches for _, _, switches in runs], ""),
        ),
        notes=(f"over {seconds} s, 5 s after the registration; one safety scan falls into a minute",),
    )


async def _minute(seconds: int) -> tuple[float, float, float]:
    with world() as here:
        async with registered(here) as (agent, _kubelet):
            await asyncio.sleep(5)
            cpu, main, switches = agent.cpu_seconds(), agent.schedstat_seconds(), agent.voluntary_switches()
            await asyncio.sleep(seconds)
            agent.check()
            share = 60 / seconds
            return (
                (agent.cpu_seconds() - cpu) * share * 1e3,
                (agent.schedstat_seconds() - main) * share * 1e3,
                (agent.voluntary_switches() - switches) * share,
            )
