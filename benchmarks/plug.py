"""Latency from the creation or removal of a card's class link to the device list for the kubelet."""

import random
import time

from benchmarks.agent import GPU, agent, gpu_npu_node
from benchmarks.figures import Result, Scale, median, single
from benchmarks.reference_kubelet import DeviceList, ReferenceKubelet
from benchmarks.syscall_timestamps import SyscallTimestamps

_BUDGET, _PEER, _SLOWEST_PEER = 50, {"Go GPU plugin": 2800.0}, {"Go GPU plugin": 5000.0}


def measure(scale: Scale) -> Result:
    plugged: list[float] = []
    unplugged: list[float] = []
    spread = random.Random(1)  # noqa: S311 - random delays, not security
    with gpu_npu_node() as setup, ReferenceKubelet(setup.kubelet_dir) as kubelet, agent(setup):
        kubelet.registrations(2)
        initial = kubelet.wait_for(lambda update: update.resource == GPU and bool(update.devices)).devices
        link = f"{setup.node.root}/sys/class/drm/card4"
        timestamps = SyscallTimestamps(link)
        for _ in range(scale.of(50, 5)):
            time.sleep(spread.uniform(0.05, 0.25))
            setup.node.plug_gpu()
            plugged.append(
                _milliseconds_since(
                    timestamps.at[link], kubelet.wait_for(lambda update: _healthy(update) == len(initial) + 1)
                )
            )
            time.sleep(spread.uniform(0.05, 0.25))
            setup.node.unplug("card4")
            unplugged.append(
                _milliseconds_since(
                    timestamps.at[link], kubelet.wait_for(lambda update: _healthy(update) == len(initial))
                )
            )
            kubelet.wait_for(lambda update: update.resource == GPU and len(update.devices) == len(initial))
    return Result(
        figures=(
            median("plug", plugged, "ms", budget=_BUDGET, peers=_PEER),
            single("plug, slowest", max(plugged), "ms", samples=len(plugged), budget=_BUDGET, peers=_SLOWEST_PEER),
            median("unplug", unplugged, "ms", budget=_BUDGET, peers=_PEER),
            single(
                "unplug, slowest", max(unplugged), "ms", samples=len(unplugged), budget=_BUDGET, peers=_SLOWEST_PEER
            ),
        ),
        notes=("unplug: until the card is listed as Unhealthy; it leaves the list one second later",),
    )


def _healthy(update: DeviceList) -> int:
    if update.resource != GPU:
        return -1
    return sum(health == "Healthy" for health in update.devices.values())


def _milliseconds_since(since: float, update: DeviceList) -> float:
    return (update.at - since) * 1e3
