"""Onload at a kubelet: the health of the devices follows the files of the node, and containers get their version."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Run, Start
from kubelets import Counts, Kubelet, PodRejected
from peer import Peer, refusal
from trees import link, write

from accelplane.plugins.onload import OnloadConfig, OnloadDropin, OnloadPlugin

pytestmark = pytest.mark.memory

# Longer than any test: changes are detected by events.
PATIENT = {"safety_interval": 3600.0}
ONLOAD = "amd.com/onload"
NODES = ["/dev/onload", "/dev/onload_epoll", "/dev/sfc_char"]
LIBRARIES = "opt/onload/usr/lib64"


def install(root: Path, version: str) -> None:
    """Another version, as the init container installs it."""
    top = root / "opt/onload"
    write(top / f"versions/{version}/usr/lib64/libonload.so", version)
    link(top / ".next", f"versions/{version}").rename(top / "current")
    if not (top / "usr").is_symlink():
        link(top / "usr", "current/usr")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with one NIC, the module and version 1."""
    root = tmp_path / "tree"
    write(root / "sys/class/net/sfc0/device/vendor", "0x1924\n")
    write(root / "sys/class/net/sfc0/device/numa_node", "1\n")
    write(root / "sys/module/onload/initstate", "live\n")
    for path in NODES:
        write(root / path[1:], "")
    install(root, "1")
    return root


def counts(capacity: int, allocatable: int) -> Mapping[str, Counts]:
    return {ONLOAD: Counts(capacity, allocatable)}


async def test_the_command_registers_its_devices_at_its_own_socket(run: Run, kubelet: Kubelet, node: Path) -> None:
    process = run("onload-device-plugin", "-maxPods=3", "-v=1")
    await kubelet.until(lambda resources: resources == counts(3, 3))
    assert "sfc-deviceplugin.sock" in os.listdir(f"{kubelet.directory}/device-plugins")
    container = await kubelet.run_pod("pod", {ONLOAD: 1})
    assert [(device.host_path, device.permissions) for device in container.devices] == [(path, "mrw") for path in NODES]
    assert container.envs["LD_PRELOAD"] == "/opt/onload/usr/lib64/libonload.so"
    await kubelet.restart()
    await kubelet.until(lambda resources: resources == counts(3, 3))
    assert await process.terminate() == 0


@pytest.mark.parametrize(
    "path", ["dev/onload", "sys/module/onload", "sys/class/net/sfc0", "opt/onload/usr", "opt/onload/current"]
)
async def test_all_devices_are_unhealthy_while_a_file_is_missing(
    node: Path, kubelet: Kubelet, start_agent: Start, path: str
) -> None:
    await start_agent({**PATIENT, "root": str(node)}, onload=OnloadDropin(OnloadConfig(max_pods=5)))
    await kubelet.until(lambda resources: resources == counts(5, 5))
    (node / path).rename(node / "elsewhere")
    await kubelet.until(lambda resources: resources == counts(5, 0))
    with pytest.raises(PodRejected):
        await kubelet.run_pod("meanwhile", {ONLOAD: 1})
    (node / "elsewhere").rename(node / path)
    await kubelet.until(lambda resources: resources == counts(5, 5))


async def test_a_container_gets_the_libraries_of_the_version_that_is_installed(
    node: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    await start_agent({**PATIENT, "root": str(node)}, onload=OnloadDropin())
    await kubelet.until(lambda resources: resources == counts(100, 100))
    for version in ("1", "2"):
        install(node, version)
        container = await kubelet.run_pod(f"version-{version}", {ONLOAD: 2})
        assert [(mount.host_path, mount.container_path, mount.read_only) for mount in container.mounts] == [
            (f"/opt/onload/versions/{version}/usr/lib64/libonload.so", "/opt/onload/usr/lib64/libonload.so", True)
        ]


async def test_the_agent_publishes_onload_once_its_files_are_installed(
    node: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    (node / "opt").rename(node / "uninstalled")
    agent = await start_agent({**PATIENT, "root": str(node)}, onload=OnloadPlugin())
    await agent.runners["onload"].scan.completed.wait()
    assert kubelet.resources() == {}
    (node / "uninstalled").rename(node / "opt")
    await kubelet.until(lambda resources: resources == counts(100, 100))
    (node / "opt").rename(node / "uninstalled")
    await kubelet.until(lambda resources: resources == counts(100, 0))


async def test_unknown_ids_are_rejected(directory: str, node: Path, kubelet: Kubelet, start_agent: Start) -> None:
    await start_agent({**PATIENT, "root": str(node)}, onload=OnloadDropin())
    await kubelet.until(lambda resources: resources == counts(100, 100))
    async with Peer(f"{directory}/device-plugins/sfc-deviceplugin.sock") as peer:
        _code, text = await refusal(peer.allocate(["sfc-100"]))
    assert text == "amd.com/onload: unknown device 'sfc-100' requested"
