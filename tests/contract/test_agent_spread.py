"""Containers that request one device are spread over the units of a family. The kubelet offers IDs in random order."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Start
from kubelets import Kubelet, embedded_only
from trees import gpu_card, write
from trees_qat import pf

from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.idxd import DsaConfig, DsaPlugin
from accelplane.plugins.qat import QatPlugin


def gpus(root: Path) -> Plugin[Any]:
    for index in range(4):
        gpu_card(root, index)
    return GpuPlugin(GpuConfig(shared_dev_num=10))


def queues(root: Path) -> Plugin[Any]:
    for number in range(4):
        directory = root / f"sys/bus/dsa/devices/dsa0/wq0.{number}"
        for attribute, text in (("state", "enabled"), ("type", "user"), ("mode", "shared")):
            write(directory / attribute, f"{text}\n")
        write(root / f"dev/dsa/wq0.{number}", "")
    return DsaPlugin(DsaConfig(shared_dev_num=10))


def vfs(root: Path) -> Plugin[Any]:
    for bus in ("6b", "70", "75", "7a"):
        pf(root, f"0000:{bus}:00.0", vfs=range(5))
    return QatPlugin()


class History(NamedTuple):
    """A number of pods and how many of them use each unit at the end, in ascending order."""

    family: Callable[[Path], Plugin[Any]]
    resource: str
    pods: int
    spread: list[int]


@embedded_only("containers of a real runtime need the device nodes")
@pytest.mark.parametrize(
    "history",
    [
        History(gpus, "gpu.intel.com/i915", 8, [2, 2, 2, 2]),
        History(queues, "dsa.intel.com/wq-user-shared", 10, [2, 2, 3, 3]),
        History(vfs, "qat.intel.com/cy", 16, [4, 4, 4, 4]),
    ],
    ids=["gpu", "dsa", "qat"],
)
async def test_pods_are_spread_over_the_least_used_units(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, history: History
) -> None:
    family, resource, pods, spread = history
    agent = await start_agent(family=family(tmp_path))
    await kubelet.until(lambda resources: resource in resources and resources[resource].allocatable > pods)
    units = {device.nodes[0].host_path: device.unit for device in agent.runners["family"].context.devices.listed}

    async def run(name: str) -> str:
        container = await kubelet.run_pod(name, {resource: 1})
        return units[container.devices[0].host_path]

    unit_of = {name: await run(name) for name in map("pod-{}".format, range(pods))}
    assert sorted(Counter(unit_of.values()).values()) == spread
    released = [name for name, unit in unit_of.items() if unit == unit_of["pod-0"]]
    for name in released:
        await kubelet.delete_pod(name)
    assert {await run(f"again-{name}") for name in released} == {unit_of["pod-0"]}
