"""Uevents about faulty devices change health, pages and the inventory of an agent; forged uevents do not."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, os, socket, sys
sys.path[:0] = [{tests!r}]
from textformat import parse
from waiting import until
from accelplane.node.agent import Agent
from accelplane.pages.metrics import MetricsPage
from accelplane.pages.observer import Observer
from accelplane.node.settings import Settings
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedNode
from accelplane.simulate.uevents import uevent

GPU, NPU = "/devices/pci0000:00/0000:03:00.0", "/devices/pci0000:00/0000:00:0b.0"

def forge(devpath):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15) as sender:
        message = f"change@{{devpath}}\\0SUBSYSTEM=pci\\0ERROR_EVENT=FAILED_RECOVERY\\0"
        sender.sendto(message.encode(), (0, 1))

async def main():
    os.makedirs("{directory}/device-plugins")
    root = "{directory}/root"
    SimulatedNode(root).build(NodeSpec(gpus=[GpuSpec(bdf="0000:03:00.0")], npus=[NpuSpec(bdf="0000:00:0b.0")]))
    settings = Settings(root=root, kubelet_dir="{directory}", cdi_dir="{directory}/cdi", safety_interval=3600.0)
    agent = Agent(settings, {{"gpu": GpuPlugin(), "npu": NpuPlugin()}})
    task = asyncio.create_task(agent.run())
    observer, page = Observer(agent), MetricsPage()

    def phases():
        found = {{}}
        for plugin in agent.status().plugins.values():
            for unit, health in plugin.health.items():
                found[unit] = f"{{health.phase.value}}:{{health.cause}}"
        return found

    def unhealthy():
        return sum(
            not device.healthy for plugin in agent.status().plugins.values()
            for resource in plugin.resources.values() for device in resource.devices.values()
        )

    async def samples(name):
        found = parse(page.render(agent.status(), await observer.contents()))
        return sorted((each.labels["device"], each.labels.get("outcome"), each.value) for each in found[name].samples
            if each.labels.get("outcome") != "succeeded")

    await until(lambda: [len(runner.publisher.served) for runner in agent.runners.values()] == [1, 1], 30)
    forge(GPU)
    uevent("change", f"{{GPU}}/drm/card0", "drm", WEDGED="rebind,bus-reset")
    await until(lambda: phases() == {{"card0": "unhealthy:wedged"}} and unhealthy() == 1, 30)
    uevent("change", NPU, "pci", ERROR_EVENT="BEGIN_RECOVERY", DEVICE_ONLINE="0")
    uevent("change", NPU, "pci", ERROR_EVENT="FAILED_RECOVERY", DEVICE_ONLINE="0")
    await until(lambda: phases().get("accel0") == "unhealthy:pci-recovery" and unhealthy() == 2, 30)
    print(await samples("accelplane_gpu_wedged_total"))
    print(await samples("accelplane_pci_recoveries_total"))
    uevent("bind", GPU, "pci", DRIVER="i915")
    uevent("bind", NPU, "pci", DRIVER="intel_vpu")
    await until(lambda: set(phases().values()) == {{"healthy:other"}} and unhealthy() == 0, 30)
    await observer.close()
    agent.stop()
    await task

asyncio.run(main())
"""


def test_wedged_and_failed_devices_are_unhealthy_until_they_are_rebound(directory: str) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent.parent), directory=directory)
    result = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    if result.returncode and "Operation not permitted" in result.stderr:
        pytest.skip("needs root")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "[('card0', None, 1.0)]",
        "[('accel0', 'began', 1.0), ('accel0', 'failed', 1.0), ('card0', 'began', 0.0), ('card0', 'failed', 0.0)]",
    ]
