"""The GPU plugin without a Level-Zero service."""

import subprocess
import sys
from pathlib import Path

import pytest
from trees import gpu_card

from accelplane.devices import Allocation, Device
from accelplane.host import Host
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.gpu.scan import wsl_devices


@pytest.mark.parametrize("module", ["accelplane.plugins.gpu", "accelplane.plugins.npu"])
def test_importing_a_plugin_loads_no_grpc(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('grpc', 'hpack', 'google.protobuf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_the_service_is_not_queried_without_health_or_wsl(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    plugin, host = GpuPlugin(), Host(tmp_path)
    await plugin.refresh(host)
    await plugin.background(host, lambda: None)
    assert len(list(plugin.scan(host))) == 1


@pytest.mark.parametrize(
    ("config", "queried"),
    [
        (GpuConfig(), False),
        (GpuConfig(wsl=True), False),
        (GpuConfig(health_management=True), True),
        (GpuConfig(xpumd_endpoint="/run/xpumd.sock"), True),
    ],
)
def test_health_is_queried_only_with_a_service(config: GpuConfig, queried: bool) -> None:
    assert GpuPlugin(config).overrides("health") is queried


def dxg(*indices: int, cdi: str = "auto", shares: int = 1) -> list[Device]:
    return list(wsl_devices(indices, GpuConfig(wsl=True, cdi=cdi, shared_dev_num=shares)))


def test_windows_gpus_share_one_device_file_and_differ_in_a_variable() -> None:
    found = dxg(0, 3, shares=2)
    assert [device.id for device in found] == ["card0-0", "card0-1", "card3-0", "card3-1"]
    last = found[-1]
    assert (last.resource, last.unit, last.topology, last.cdi) == ("dxg", "card3", None, None)
    assert [(node.host_path, node.permissions) for node in last.nodes] == [("/dev/dxg", "rw")]
    assert [(mount.host_path, mount.read_only) for mount in last.mounts] == [("/usr/lib/wsl", True)]
    assert last.envs == {"ZE_AFFINITY_MASK": "3"}


def test_wsl_gpus_use_cdi_only_if_requested() -> None:
    (device,) = dxg(2, cdi="only")
    assert not device.nodes
    assert device.cdi is not None
    assert [node.path for node in device.cdi.nodes] == ["/dev/dxg"]


async def test_a_container_with_several_windows_gpus_sees_them_all_once_and_in_order() -> None:
    devices = dxg(10, 2, shares=2)
    answer = await GpuPlugin(GpuConfig(wsl=True)).post_allocate(devices, Allocation.of(devices))
    assert answer.envs == {"ZE_AFFINITY_MASK": "2,10"}
    assert [node.host_path for node in answer.nodes] == ["/dev/dxg"]


async def test_responses_for_other_gpus_are_unchanged(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    plugin = GpuPlugin()
    devices = [item for item in plugin.scan(Host(tmp_path)) if isinstance(item, Device)]
    answer = Allocation.of(devices)
    assert await plugin.post_allocate(devices, answer) is answer


async def test_the_allocation_policy_is_the_configured_one(tmp_path: Path) -> None:
    for index in (0, 1):
        gpu_card(tmp_path, index)
    answers: dict[str, list[str]] = {}
    for policy in ("none", "packed"):
        plugin = GpuPlugin(GpuConfig(shared_dev_num=2, allocation_policy=policy))
        devices = [item for item in plugin.scan(Host(tmp_path)) if isinstance(item, Device)]
        answers[policy] = list(await plugin.preferred_allocation(devices, [], 2, {}))
    assert answers == {"none": ["card0-0", "card1-0"], "packed": ["card0-0", "card0-1"]}
