"""A file of one device that blocks affects this device only: every other one is found, removed and listed as usual."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockedfiles import BlockedFiles, blocked_files
from conftest import Start
from kubelets import Kubelet, embedded_only
from trees import gpu_card, write
from waiting import until

from accelplane.host import isolation
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

I915 = "gpu.intel.com/i915"
one_kubelet = embedded_only("the first test shows the same to a real kubelet")
QUIET = {"safety_interval": 3600.0, "scan_grace": 3600.0}


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedFiles]:
    monkeypatch.setattr(isolation, "UNHEALTHY_AFTER", 1.0)
    monkeypatch.setattr(isolation, "POLL_INTERVAL", 0.1)
    with blocked_files() as files:
        yield files


async def test_only_the_gpu_whose_file_blocks_is_unhealthy_and_cards_are_added_and_removed_meanwhile(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, blocked: BlockedFiles
) -> None:
    for index in range(3):
        gpu_card(tmp_path, index)
    agent = await start_agent(QUIET, gpu=GpuPlugin(GpuConfig(shared_dev_num=2)))
    await kubelet.until(lambda resources: resources == {I915: (6, 6)})
    before = agent.runners["gpu"].context.devices.listed.resources["i915"]["card0-0"]
    write(tmp_path / "sys/devices/pci0000:00/0000:03:00.0/sriov_numvfs", "0\n")
    blocked.block("card0/device/sriov_numvfs")
    agent.runners["gpu"].scan.request()
    await kubelet.until(lambda resources: resources == {I915: (6, 4)})
    device = agent.runners["gpu"].context.devices.listed.resources["i915"]["card0-0"]
    assert device.reason == "/sys/class/drm/card0/device/sriov_numvfs does not answer"
    assert (device.nodes, device.attributes) == (before.nodes, before.attributes)
    gpu_card(tmp_path, 3)
    await kubelet.until(lambda resources: resources == {I915: (8, 6)})
    os.unlink(tmp_path / "sys/class/drm/card1")
    await kubelet.until(lambda resources: resources == {I915: (6, 4)})
    assert len(blocked.waiting) == 1, "one thread for each blocked device"
    assert not agent.runners["gpu"].scan.failing
    blocked.release("card0/device/sriov_numvfs")
    await kubelet.until(lambda resources: resources == {I915: (6, 6)})


@one_kubelet
async def test_a_blocked_device_stays_healthy_for_a_time_in_which_drivers_hold_its_lock(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, blocked: BlockedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "UNHEALTHY_AFTER", 3600.0)
    gpu_card(tmp_path, 0)
    agent = await start_agent(QUIET, gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    blocked.block("card0/device/vendor")
    agent.runners["gpu"].scan.request()
    await until(lambda: "0000:03:00.0" in agent.blocked.by_device)
    gpu_card(tmp_path, 1)
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})


@one_kubelet
async def test_a_device_that_blocks_from_the_start_is_skipped_with_a_reason(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, blocked: BlockedFiles
) -> None:
    gpu_card(tmp_path, 0)
    gpu_card(tmp_path, 1)
    blocked.block("card0/device/vendor")
    agent = await start_agent(QUIET, gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    (skipped,) = agent.status().plugins["gpu"].skipped
    assert (skipped.subject, skipped.reason) == ("0000:03:00.0", "/sys/class/drm/card0/device/vendor does not answer")
    blocked.release("card0/device/vendor")
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})


@one_kubelet
async def test_a_health_file_that_blocks_keeps_one_thread_and_makes_its_card_unhealthy(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, blocked: BlockedFiles
) -> None:
    for index in range(2):
        write(gpu_card(tmp_path, index, driver="xe") / "gpu_health", "ok\n")
    agent = await start_agent({**QUIET, "health_interval": 1.0}, gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/xe": (2, 2)})
    threads = threading.active_count()
    blocked.block("card0/device/gpu_health")
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/xe": (2, 1)})
    for _ in range(20):
        await agent.runners["gpu"].health.check_new_devices()
        agent.runners["gpu"].request_check()
    assert len(blocked.waiting) == 1
    assert threading.active_count() <= threads + 2
    write(tmp_path / "sys/class/drm/card1/device/gpu_health", "critical\n")
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/xe": (2, 0)})
    blocked.release("card0/device/gpu_health")
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/xe": (2, 1)})
