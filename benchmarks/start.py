"""From the start of the process to its registrations at a kubelet that waits for it."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.agent import World, agent, whole_world, world
from benchmarks.figures import Outcome, Scale, median
from benchmarks.peer import Registry


def measure(scale: Scale) -> Outcome:
    count = scale.of(15, 2)
    python = [_bare_python() for _ in range(count)]
    cards = [_registered(world) for _ in range(count)]
    families = [_registered(whole_world) for _ in range(count)]
    return Outcome(
        figures=(
            median("first registration", [times[0] for times in cards], "s", budget=1.0, peers={"Go GPU plugin": 1.02}),
            median("both resources registered", [times[-1] for times in cards], "s"),
            median("all families: first registration", [times[0] for times in families], "s", budget=1.0),
            median("all families: all 8 resources registered", [times[-1] for times in families], "s"),
            median("of it a Python that does nothing", python, "s"),
        ),
        notes=(
            "from before the agent is started until Register is in the hands of the kubelet; compiled code is there",
        ),
    )


def _registered(make: Callable[[], AbstractContextManager[World]]) -> list[float]:
    """Seconds to each resource's registration."""
    with make() as here, Registry(here.kubelet_dir) as registry:
        start = time.perf_counter()
        with agent(here):
            return sorted(one.at - start for one in registry.registrations(here.resources).values())


def _bare_python() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return time.perf_counter() - start
