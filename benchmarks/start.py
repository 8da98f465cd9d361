"""From the start of the process to its first registration at a kubelet that waits for it."""

import subprocess
import sys
import time

from benchmarks.agent import agent, world
from benchmarks.figures import Outcome, Scale, median
from benchmarks.peer import Registry


def measure(scale: Scale) -> Outcome:
    first: list[float] = []
    everything: list[float] = []
    python: list[float] = []
    for _ in range(scale.of(15, 3)):
        python.append(_bare_python())
        with world() as here, Registry(here.kubelet_dir) as registry:
            start = time.perf_counter()
            with agent(here):
                times = sorted(one.at for one in registry.registrations(2).values())
                first.append(times[0] - start)
                everything.append(times[-1] - start)
    return Outcome(
        figures=(
            median("first registration", first, "s", budget=1.0, peers={"Go GPU plugin": 1.02}),
            median("both resources registered", everything, "s"),
            median("of it a Python that does nothing", python, "s"),
        ),
        notes=(
            "from before the agent is started until Register is in the hands of the kubelet; compiled code is there",
        ),
    )


def _bare_python() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return time.perf_counter() - start
