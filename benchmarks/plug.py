"""Latency from the creation or removal of a card's class link to the device list for the kubelet."""

import random
import time

from benchmarks.agent import GPU, agent, world
from benchmarks.figures import Outcome, Scale, median, single
from benchmarks.peer import Listed, Registry
from benchmarks.syscall_timestamps import SyscallTimestamps

_BUDGET, _PEER, _SLOWEST_PEER = 50, {"Go GPU plugin": 2800.0}, {"Go GPU plugin": 5000.0}


def measure(scale: Scale) -> Outcome:
    plugged: list[float] = []
    unplugged: list[float] = []
    spread = random.Random(1)  # noqa: S311 - only to come at any time
    with world() as here, Registry(here.kubelet_dir) as registry, agent(here):
        registry.registrations(2)
        known = registry.until(lambda listed: listed.resource == GPU and bool(listed.devices)).devices
        link = f"{here.node.root}/sys/class/drm/card4"
        timestamps = SyscallTimestamps(link)
        for _ in range(scale.of(50, 5)):
            time.sleep(spread.uniform(0.05, 0.25))
            here.node.plug_gpu()
            plugged.append(
                _after(timestamps.at[link], registry.until(lambda listed: _healthy(listed) == len(known) + 1))
            )
            time.sleep(spread.uniform(0.05, 0.25))
            here.node.unplug("card4")
            unplugged.append(_after(timestamps.at[link], registry.until(lambda listed: _healthy(listed) == len(known))))
            registry.until(lambda listed: listed.resource == GPU and len(listed.devices) == len(known))
    return Outcome(
        figures=(
            median("plug", plugged, "ms", budget=_BUDGET, peers=_PEER),
            single("plug, slowest", max(plugged), "ms", samples=len(plugged), budget=_BUDGET, peers=_SLOWEST_PEER),
            median("unplug", unplugged, "ms", budget=_BUDGET, peers=_PEER),
            single(
                "unplug, slowest", max(unplugged), "ms", samples=len(unplugged), budget=_BUDGET, peers=_SLOWEST_PEER
            ),
        ),
        notes=("unplug: until the card is unhealthy in the list, from which it goes a second later",),
    )


def _healthy(listed: Listed) -> int:
    if listed.resource != GPU:
        return -1
    return sum(health == "Healthy" for health in listed.devices.values())


def _after(moment: float, listed: Listed) -> float:
    return (listed.at - moment) * 1e3
