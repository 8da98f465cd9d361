"""One scan of a large node below a root: 64 cards, each shared by 8 containers."""

import time

from accelplane.host import Host
from accelplane.node.runner import scanned
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.gpu.config import GpuConfig
from benchmarks.agent import world
from benchmarks.figures import Outcome, Scale, median

_CARDS, _WAYS = 64, 8


def measure(scale: Scale) -> Outcome:
    plugin = GpuPlugin(GpuConfig(shared_dev_num=_WAYS))
    times: list[float] = []
    with world(cards=_CARDS, npus=0) as here:
        found = len(scanned(plugin, Host(here.root)))
        assert found == _CARDS * _WAYS, f"{found} devices found"
        for _ in range(scale.of(50, 10)):
            start = time.perf_counter()
            scanned(plugin, Host(here.root))
            times.append((time.perf_counter() - start) * 1e3)
    return Outcome(figures=(median(f"scan of {_CARDS} cards shared {_WAYS} ways", times, "ms", budget=15),))
