"""The labels of GPU capacity in the NFD hook, `accelplane labels` and the plugin's file."""

import json
import os
import platform
import stat
import subprocess
from pathlib import Path

import pytest
from conftest import Run, Start
from node_api import node_api
from processes import run_main
from trees import gpu_card, link, write
from waiting import until

from accelplane.cli import gpuhook, labels
from accelplane.cli.labels import Options
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.simulate.levelzero import LevelZeroService

GPU = "gpu.intel.com"
LINES = {
    f"{GPU}/cards=card0",
    f"{GPU}/gpu-numbers=0",
    f"{GPU}/memory.max=4096",
    f"{GPU}/millicores=1000",
    f"{GPU}/numa-gpu-map=0-0",
    f"{GPU}/tiles=2",
}
FRACTIONS = {f"{GPU}/millicores": 1000, f"{GPU}/memory.max": 4096, f"{GPU}/tiles": 2}


def card(root: Path, index: int = 0) -> Path:
    """A Flex 170 with two tiles of 2 KiB."""
    function = gpu_card(root, index, device_id="0x56c0")
    write(function / "class", "0x038000\n")
    link(root / "sys/bus/pci/devices" / function.name, function)
    write(function / f"drm/card{index}/lmem_total_bytes", "2048\n")
    for number in range(2):
        (function / f"drm/card{index}/gt/gt{number}").mkdir(parents=True)
    return function


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPU_MEMORY_OVERRIDE", "GPU_MEMORY_RESERVED", "GPU_PCI_GROUPING_LEVEL"):
        monkeypatch.delenv(name, raising=False)


# The hook.


def hook(root: Path) -> subprocess.CompletedProcess[str]:
    return run_main(gpuhook.main, f"-root={root}")


def test_the_hook_prints_the_labels_of_the_host(tmp_path: Path) -> None:
    card(tmp_path)
    result = hook(tmp_path)
    assert (result.returncode, set(result.stdout.splitlines())) == (0, LINES)
    # As NFD's worker mounts the sysfs of the node.
    (tmp_path / "sys").rename(tmp_path / "host-sys")
    card(tmp_path, 1)
    assert set(hook(tmp_path).stdout.splitlines()) == LINES


def test_variables_change_what_the_hook_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = card(tmp_path)
    monkeypatch.setenv("GPU_MEMORY_RESERVED", "96")
    monkeypatch.setenv("GPU_PCI_GROUPING_LEVEL", "1")
    lines = hook(tmp_path).stdout.splitlines()
    assert f"{GPU}/memory.max=4000" in lines
    assert f"{GPU}/pci-groups=0" in lines
    (function / "drm/card0/lmem_total_bytes").unlink()
    monkeypatch.setenv("GPU_MEMORY_OVERRIDE", "5")
    assert f"{GPU}/memory.max=5" in hook(tmp_path).stdout.splitlines()


def test_the_hook_succeeds_without_labels_if_they_cannot_be_read(tmp_path: Path) -> None:
    link(tmp_path / "sys/class/drm", "drm")
    result = hook(tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert "no labels" in result.stderr


def test_the_hook_prints_no_labels_without_a_drm_directory(tmp_path: Path) -> None:
    result = hook(tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert "no labels: /sys/class/drm does not exist" in result.stderr


def test_the_hook_succeeds_if_it_cannot_log(tmp_path: Path) -> None:
    result = run_main(gpuhook.main, "-logtostderr=false", f"-log_file={tmp_path}/none/log")
    assert (result.returncode, result.stdout) == (0, "")
    assert "intel-gpu-nfdhook" in result.stderr


# The init container.


def installed(root: Path, *places: str) -> subprocess.CompletedProcess[str]:
    for place in places:
        (root / place).mkdir(exist_ok=True)
    return run_main(
        gpuhook.install, f"-root={root}/root", f"-source-dir={root}/source.d", f"-features-dir={root}/features.d"
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="installs a program for x86-64")
def test_the_installed_hook_prints_the_same_labels_without_an_environment(tmp_path: Path) -> None:
    card(tmp_path / "root")
    assert installed(tmp_path, "source.d").returncode == 0
    path = tmp_path / "source.d/intel-gpu-nfdhook"
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    result = subprocess.run([path], capture_output=True, text=True, check=False, env={})
    assert (result.returncode, set(result.stdout.splitlines()), result.stderr) == (0, LINES, "")


def test_a_feature_file_is_written_if_its_directory_exists(tmp_path: Path) -> None:
    card(tmp_path / "root")
    assert installed(tmp_path, "features.d").returncode == 0
    assert set((tmp_path / "features.d/intel-gpu-resources.txt").read_text().splitlines()) == LINES
    assert os.listdir(tmp_path / "features.d") == ["intel-gpu-resources.txt"]


def test_an_unreadable_host_does_not_prevent_the_pod_from_starting(tmp_path: Path) -> None:
    card(tmp_path / "root")
    assert installed(tmp_path, "source.d", "features.d").returncode == 0
    (tmp_path / "root/sys/class/drm").rename(tmp_path / "elsewhere")
    link(tmp_path / "root/sys/class/drm", "drm")
    assert installed(tmp_path, "source.d", "features.d").returncode == 0
    # The labels of an earlier start are better than none.
    assert set((tmp_path / "features.d/intel-gpu-resources.txt").read_text().splitlines()) == LINES


@pytest.mark.parametrize("blocked", [(), ("source.d/intel-gpu-nfdhook",)])
def test_a_failed_installation_names_the_directory(tmp_path: Path, blocked: tuple[str, ...]) -> None:
    for path in blocked:
        (tmp_path / path).mkdir(parents=True)
    card(tmp_path / "root")
    result = installed(tmp_path)
    assert result.returncode == 1
    assert str(tmp_path / "source.d") in result.stderr


# accelplane labels.


def test_capacity_is_printed_as_labels_and_resources(tmp_path: Path) -> None:
    card(tmp_path)
    document = json.loads(run_main(labels.main, f"-root={tmp_path}", "-output=json", "-gpu").stdout)
    assert {f"{key}={value}" for key, value in document["labels"].items()} >= LINES
    assert document["labels"][f"{GPU}/product"] == "Flex_170"
    assert document["resources"] == {name: str(amount) for name, amount in FRACTIONS.items()}
    without = json.loads(run_main(labels.main, f"-root={tmp_path}", "-output=json").stdout)
    assert f"{GPU}/tiles" not in without["labels"]
    assert without["resources"] == {}


def test_other_labels_remain_if_the_capacity_is_unreadable(tmp_path: Path) -> None:
    function = card(tmp_path)
    write(tmp_path / "proc/modules", "i915 1 0 - Live 0x0\n")
    (function / "drm").rename(function / "moved")
    link(tmp_path / "sys/class/drm/card9", function / "moved/card0")
    result = run_main(labels.main, f"-root={tmp_path}", "-gpu")
    assert f"{GPU}/tiles" not in result.stdout
    assert "intel.feature.node.kubernetes.io/gpu" in result.stdout
    assert "no labels of GPU capacity" in result.stderr


def test_a_feature_file_has_the_labels_and_nfd_creates_the_resources(tmp_path: Path) -> None:
    card(tmp_path)
    assert (
        run_main(labels.main, f"-root={tmp_path}", "-output=nfd", f"-features-dir={tmp_path}", "-gpu").returncode == 0
    )
    lines = (tmp_path / "accelplane-features.txt").read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert set(lines) >= LINES


@pytest.mark.parametrize(("epc", "gpu"), [(True, False), (False, True), (True, True)])
async def test_the_node_gets_the_resources_of_the_given_flags(tmp_path: Path, epc: bool, gpu: bool) -> None:
    root = tmp_path / "root"
    card(root)
    write(root / "proc/cpuinfo", "processor : 0\nflags : sgx sgx_lc\n")
    write(root / "sys/devices/system/node/node0/x86/sgx_total_bytes", "77\n")
    write(root / "sys/class/misc/sgx_enclave/dev", "10:125\n")
    options = Options.from_flags({"output": "node", "node-name": "one", "root": str(root), "epc": epc, "gpu": gpu}, {})
    async with node_api(tmp_path) as (api, peer):
        await labels.run(options, peer.api)
        sent = {path.partition("?")[0]: body for path, body in api.patches}
    expected = {name: str(amount) for name, amount in FRACTIONS.items()} if gpu else {}
    expected |= {"sgx.intel.com/epc": "77"} if epc else {}
    assert sent["/api/v1/nodes/one/status"]["status"]["capacity"] == expected
    assert (f"{GPU}/millicores" in sent["/api/v1/nodes/one"]["metadata"]["labels"]) is gpu


# The plugin.


async def test_the_plugin_keeps_its_label_file_up_to_date_and_removes_it(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "features.d"
    directory.mkdir()
    card(tmp_path / "tree")
    process = run("intel_gpu_device_plugin", "-resource-labels", f"-nfd-dir={directory}")
    file = directory / "intel-gpu-resources.txt"
    await until(file.exists)
    assert set(file.read_text().splitlines()) == LINES
    card(tmp_path / "tree", 1)
    await until(lambda: f"{GPU}/millicores=2000\n" in file.read_text())
    assert await process.terminate() == 0
    assert os.listdir(directory) == []


async def test_labels_that_cannot_be_read_are_unchanged(start_agent: Start, tmp_path: Path) -> None:
    directory = tmp_path / "features.d"
    directory.mkdir()
    device = tmp_path / "sys/class/drm/card0/device"
    (device / "drm/card0").mkdir(parents=True)
    write(device / "vendor", "0x8086\n")
    write(tmp_path / "dev/dri/card0", "")
    agent = await start_agent({"nfd_dir": str(directory)}, gpu=GpuPlugin(GpuConfig(resource_labels=True)))
    file = directory / "intel-gpu-resources.txt"
    await until(file.exists)
    before = file.read_text()
    assert f"{GPU}/millicores=1000\n" in before
    # As while its driver is loaded again.
    (device / "drm").rename(device / "elsewhere")
    await until(
        lambda: [skipped.subject for skipped in agent.runners["gpu"].context.devices.found.skipped] == ["card0"]
    )
    assert file.read_text() == before


async def test_memory_is_what_the_level_zero_service_reports(
    start_agent: Start, tmp_path: Path, directory: str
) -> None:
    card(Path(directory))
    features = tmp_path / "features.d"
    features.mkdir()
    service = LevelZeroService(f"{directory}/var/lib/levelzero/server.sock")
    service.set_memory("0000:03:00.0", 12345)
    plugin = GpuPlugin(GpuConfig(resource_labels=True, health_management=True))
    file = features / "intel-gpu-resources.txt"
    await start_agent({"nfd_dir": str(features), "root": directory}, gpu=plugin)
    await until(file.exists)
    assert f"{GPU}/memory.max=4096\n" in file.read_text()
    async with service:
        await until(lambda: f"{GPU}/memory.max=12345\n" in file.read_text())


async def test_without_the_option_the_plugin_has_no_label_file(start_agent: Start, tmp_path: Path) -> None:
    directory = tmp_path / "features.d"
    directory.mkdir()
    card(tmp_path)
    agent = await start_agent({"nfd_dir": str(directory)}, gpu=GpuPlugin())
    await until(lambda: len(agent.runners["gpu"].context.devices.listed) > 0)
    assert os.listdir(directory) == []
