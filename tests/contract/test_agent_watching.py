"""Hot-plug while the agent runs: changes of a tree of files, and uevents of the kernel."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import Start
from gadgets import Shelf, Slow, gadgets
from kubelets import Kubelet
from peer import Peer
from trees import gpu_card
from waiting import until

from accelplane.node.agent import Agent
from accelplane.node.runner import PluginRunner
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.simulate.tree import GpuSpec, SimulatedNode

pytestmark = pytest.mark.memory

I915, XE, ACCEL = "gpu.intel.com/i915", "gpu.intel.com/xe", "npu.intel.com/accel"
# No timer expires within a test.
PATIENT = {"safety_interval": 3600.0}


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return SimulatedNode(tmp_path)


@pytest.fixture
async def agent(start_agent: Start, kubelet: Kubelet) -> Agent:
    """An agent with the GPU and the NPU plugin, a kubelet, and an empty tree."""
    agent = await start_agent(PATIENT, gpu=GpuPlugin(), npu=NpuPlugin())
    await until(
        lambda: len(agent.runners) == 2 and all(runner.scan.completed.is_set() for runner in agent.runners.values())
    )
    return agent


async def wait_idle(runner: PluginRunner) -> None:
    """Returns when there was no scan for a while."""
    scans = -1
    while scans != runner.scan.count:
        scans = runner.scan.count
        await asyncio.sleep(0.1)


async def test_devices_are_found_when_the_whole_of_sys_and_dev_appears_later(
    agent: Agent, kubelet: Kubelet, node: SimulatedNode
) -> None:
    assert os.listdir(node.root) == []
    node.plug_gpu()
    node.plug_npu()
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})


async def test_cards_are_counted_as_they_are_plugged_and_unplugged(
    agent: Agent, kubelet: Kubelet, node: SimulatedNode
) -> None:
    node.plug_gpu()
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    node.plug_gpu()
    node.plug_gpu(GpuSpec(driver="xe"))
    await kubelet.until(lambda resources: resources == {I915: (2, 2), XE: (1, 1)})
    node.unplug("card1")
    # The removed card is unhealthy first: the kubelet would count a missing ID as healthy.
    await kubelet.until(lambda resources: resources[I915] == (2, 1))
    await kubelet.until(lambda resources: resources == {I915: (1, 1), XE: (1, 1)})
    node.unplug("card0")
    node.unplug("card2")
    await kubelet.until(lambda resources: resources == {})
    node.plug_gpu()
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})


async def test_allocation_of_a_removed_card_fails_immediately(
    agent: Agent, kubelet: Kubelet, node: SimulatedNode
) -> None:
    node.plug_gpu()
    node.plug_gpu()
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    node.unplug("card0")
    await kubelet.until(lambda resources: resources[I915].allocatable == 1)
    container = await kubelet.run_pod("pod", {I915: 1})
    assert container.device_ids == {I915: ("card1-0",)}
    with pytest.raises(Exception, match="UnexpectedAdmissionError"):
        await kubelet.run_pod("greedy", {I915: 1})


@pytest.mark.parametrize("lacking", ["sys/class/drm", "dev/dri"])
async def test_a_directory_that_appears_last_completes_the_cards(
    agent: Agent, kubelet: Kubelet, node: SimulatedNode, tmp_path: Path, lacking: str
) -> None:
    node.plug_gpu()
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    os.rename(tmp_path / lacking, tmp_path / "aside")
    await kubelet.until(lambda resources: resources == {})
    os.rename(tmp_path / "aside", tmp_path / lacking)
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})


async def test_a_card_created_step_by_step_is_published_when_it_is_complete(
    agent: Agent, kubelet: Kubelet, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    gpu_card(whole, 0)
    function = "sys/devices/pci0000:00/0000:03:00.0"
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "sys").mkdir()
    os.rename(whole / "sys/class", tmp_path / "sys/class")
    # The kernel creates a device's directory, then its attributes; devtmpfs creates the nodes last.
    (tmp_path / function / "drm/card0").mkdir(parents=True)
    for name in ("numa_node", "local_cpulist", "vendor", "device"):
        await wait_idle(agent.runners["gpu"])
        shutil.copy(whole / function / name, tmp_path / function / name)
    (tmp_path / function / "driver").symlink_to("../../../bus/pci/drivers/i915")
    (tmp_path / function / "drm/card0/device").symlink_to("../../../0000:03:00.0")
    (tmp_path / function / "drm/renderD128").mkdir()
    await wait_idle(agent.runners["gpu"])
    assert kubelet.resources() == {}
    for node in ("card0", "renderD128"):
        (tmp_path / "dev/dri" / node).touch()
        await wait_idle(agent.runners["gpu"])
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    container = await kubelet.run_pod("early", {I915: 1})
    assert sorted(node.host_path for node in container.devices) == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert not container.mounts
    await kubelet.delete_pod("early")
    # udev adds its links long after the node.
    os.rename(whole / "dev/dri/by-path", tmp_path / "dev/dri/by-path")
    await until(lambda: all(device.mounts for device in agent.runners["gpu"].context.devices.listed))
    container = await kubelet.run_pod("late", {I915: 1})
    assert sorted(mount.container_path for mount in container.mounts) == [
        "/dev/dri/by-path/pci-0000:03:00.0-card", "/dev/dri/by-path/pci-0000:03:00.0-render",
    ]  # fmt: skip


async def test_a_rewritten_attribute_in_a_tree_of_files_is_detected(
    agent: Agent, kubelet: Kubelet, tmp_path: Path
) -> None:
    function = gpu_card(tmp_path, 0, vfs="0")
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    (function / "sriov_numvfs").write_text("4\n")
    await kubelet.until(lambda resources: resources == {})


async def test_directories_read_by_the_scan_of_a_third_party_plugin_are_watched(
    start_agent: Start, kubelet: Kubelet, tmp_path: Path
) -> None:
    await start_agent(PATIENT, shelf=Shelf())
    shelf = tmp_path / "dev/shelf"
    shelf.mkdir(parents=True)
    (shelf / "cup-1").touch()
    await kubelet.until(lambda resources: resources == {"shelf.example.com/cup": (1, 1)})
    (shelf / "cup-2").touch()
    (shelf / "plate-1").touch()
    await kubelet.until(
        lambda resources: resources == {"shelf.example.com/cup": (2, 2), "shelf.example.com/plate": (1, 1)}
    )
    shutil.rmtree(tmp_path / "dev")
    await kubelet.until(lambda resources: resources == {})
    shelf.mkdir(parents=True)
    (shelf / "cup-1").touch()
    await kubelet.until(lambda resources: resources == {"shelf.example.com/cup": (1, 1)})


@pytest.mark.parametrize("path", ["dev/dri", "sys/class/drm", "dev"])
async def test_symlink_loops_in_hardware_directories_are_ignored(
    start_agent: Start, kubelet: Kubelet, node: SimulatedNode, tmp_path: Path, path: str
) -> None:
    target = tmp_path / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(target.name)
    agent = await start_agent(PATIENT, gpu=GpuPlugin(), npu=NpuPlugin())
    await until(
        lambda: len(agent.runners) == 2 and all(runner.scan.completed.is_set() for runner in agent.runners.values())
    )
    assert not any(task.done() for task in agent._tasks.values())
    target.unlink()
    node.plug_gpu()
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})


async def test_a_flood_of_events_neither_delays_allocation_nor_causes_continuous_scans(
    start_agent: Start, kubelet: Kubelet, directory: str, tmp_path: Path
) -> None:
    class SlowShelf(Shelf):
        def scan(self, host):  # type: ignore[no-untyped-def]
            return [*Slow(gadgets("a")).scan(host), *super().scan(host)]

    shelf = tmp_path / "dev/shelf"
    shelf.mkdir(parents=True)
    agent = await start_agent(PATIENT, shelf=SlowShelf())
    await kubelet.until(lambda resources: resources == {"shelf.example.com/gadget": (1, 1)})
    runner = agent.runners["shelf"]
    over = threading.Event()

    def change_directory() -> None:
        while not over.wait(0.002):  # without a pause it would take a processor, but cause no more scans
            for number in range(40):
                (shelf / f"cup-{number}").touch()
            for number in range(40):
                (shelf / f"cup-{number}").unlink()

    before = runner.scan.count
    loop = asyncio.get_running_loop()
    started = loop.time()
    thread = threading.Thread(target=change_directory)
    thread.start()
    try:
        async with Peer(f"{directory}/device-plugins/shelf.example.com-gadget.sock") as peer:
            for _ in range(300):
                (container,) = await peer.allocate(["a"])
                assert container.devices[0].host_path == "/dev/a"
                await asyncio.sleep(0.005)
    finally:
        over.set()
        thread.join()
    seconds = loop.time() - started
    # A scan takes 50 ms, and scanning a fifth of the time beyond its credit of 0.25 s.
    assert 1 <= runner.scan.count - before <= (0.2 * seconds + 0.25) / 0.05 + 2
    (shelf / "plate-1").touch()
    await kubelet.until(lambda resources: "shelf.example.com/plate" in resources)


async def test_after_thousands_of_changes_the_list_equals_the_hardware(
    start_agent: Start, kubelet: Kubelet, tmp_path: Path
) -> None:
    await start_agent(PATIENT, shelf=Shelf())
    shelf = tmp_path / "dev/shelf"
    shelf.mkdir(parents=True)
    # More events than the kernel's queue holds.
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(min(limit, 20_000)):
        (shelf / f"cup-{number % 50}").touch()
        os.unlink(shelf / f"cup-{number % 50}")
    (shelf / "cup-last").touch()
    await kubelet.until(lambda resources: resources == {"shelf.example.com/cup": (1, 1)}, 20)


async def test_the_periodic_scan_finds_changes_without_events(start_agent: Start, kubelet: Kubelet) -> None:
    from gadgets import Table

    plugin = Table(gadgets("a"))
    await start_agent({"safety_interval": 0.2}, table=plugin)
    await kubelet.until(lambda resources: resources == {"example.com/gadget": (1, 1)})
    plugin.found = gadgets("a", "b")
    await kubelet.until(lambda resources: resources == {"example.com/gadget": (2, 2)})


UEVENTS = """
import asyncio, logging, os, sys
sys.path[:0] = [{tests!r}, {here!r}]
from gadgets import Table, gadgets
from waiting import until
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins.base import Watch
from accelplane.simulate.uevents import uevent

class Narrow(Table):
    watch = Watch(frozenset(("drm",)))

class Wide(Table):
    namespace = "wide.example.com"

async def main():
    os.mkdir("{directory}/device-plugins")
    narrow, wide = Narrow(gadgets("a")), Wide(gadgets("a"))
    settings = Settings(kubelet_dir="{directory}", cdi_dir="{directory}/cdi", safety_interval=3600.0)
    agent = Agent(settings, {{"narrow": narrow, "wide": wide}})
    task = asyncio.create_task(agent.run())
    # Events before the first scan are not subscribed to, so a second scan follows.
    await until(lambda: len(agent.runners) == 2 and [r.scan.count for r in agent.runners.values()] == [2, 1])
    narrow.found = gadgets("a", "b")
    uevent("add", "/devices/virtual/block/loop0", "block")
    uevent("add", "/devices/pci0000:00/0000:00:02.0/drm/card0", "drm")
    await until(lambda: len(agent.runners["narrow"].context.devices.found) == 2)
    print("narrow", agent.runners["narrow"].scan.count)
    for _ in range(2000):
        uevent("change", "/devices/virtual/block/loop0", "block")
    uevent("remove", "/devices/pci0000:00/0000:00:02.0/drm/card0", "drm")
    await until(lambda: agent.runners["narrow"].scan.count == 4)
    print("narrow", agent.runners["narrow"].scan.count, "wide", agent.runners["wide"].scan.count)
    counts = agent.status().uevents
    print("counted", counts.get("drm"), counts.get("block"))
    agent.stop()
    await task

asyncio.run(main())
"""


def test_uevents_request_scans_of_the_subscribed_plugins_only(directory: str) -> None:
    here = Path(__file__).parent
    script = UEVENTS.format(tests=str(here.parent), here=str(here), directory=directory)
    result = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    if result.returncode and "Operation not permitted" in result.stderr:
        pytest.skip("needs root")
    assert result.returncode == 0, result.stderr
    # A plugin whose scan reads no sysfs and that has no subsystems gets no events.
    assert result.stdout == "narrow 3\nnarrow 4 wide 1\ncounted 2 None\n", result.stderr


async def test_renaming_a_parent_of_a_watched_directory_is_detected(
    kubelet: Kubelet, start_agent: Start, tmp_path: Path
) -> None:
    """inotify sends no event to a watch if a parent of the directory is renamed."""
    SimulatedNode(tmp_path).plug_gpu()
    await start_agent(PATIENT, gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(I915) == (1, 1))
    (tmp_path / "dev").rename(tmp_path / "elsewhere")
    await kubelet.until(lambda resources: I915 not in resources)
    (tmp_path / "elsewhere").rename(tmp_path / "dev")
    await kubelet.until(lambda resources: resources.get(I915) == (1, 1))
