"""The time from the start of the agent's process to its registrations at a running kubelet."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.agent import NodeSetup, agent, gpu_npu_node, large_node
from benchmarks.figures import Result, Scale, median
from benchmarks.reference_kubelet import ReferenceKubelet


def measure(scale: Scale) -> Result:
    count = scale.of(15, 1)
    python = [_bare_python() for _ in range(count)]
    cards = [_registration_times(gpu_npu_node) for _ in range(count)]
    families = [_registration_times(large_node) for _ in range(count)]
    return Result(
        figures=(
            median("first registration", [times[0] for times in cards], "s", budget=1.0, peers={"Go GPU plugin": 1.02}),
            median("both resources registered", [times[-1] for times in cards], "s"),
            median("all families: first registration", [times[0] for times in families], "s", budget=1.0),
            median("all families: all 8 resources registered", [times[-1] for times in families], "s"),
            median("start of Python without a program", python, "s"),
        ),
        notes=("from the start of the process until the kubelet receives Register; with compiled bytecode",),
    )


def _registration_times(make: Callable[[], AbstractContextManager[NodeSetup]]) -> list[float]:
    """Seconds until the registration of each resource, sorted."""
    with make() as setup, ReferenceKubelet(setup.kubelet_dir) as kubelet:
        start = time.perf_counter()
        with agent(setup):
            return sorted(one.at - start for one in kubelet.registrations(setup.resources).values())


def _bare_python() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return time.perf_counter() - start
