"""The agent's configuration file: reading, reloading, and rejection of invalid content."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from conftest import Run
from kubelets import Kubelet, embedded_only
from processes import run_main
from waiting import until

from accelplane.cli.node import main
from accelplane.devices import Device
from accelplane.host import Host
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config
from accelplane.simulate.tree import SimulatedNode

pytestmark = pytest.mark.memory

I915, ACCEL = "gpu.intel.com/i915", "npu.intel.com/accel"
MONITORING = ("gpu.intel.com/i915_monitoring", "gpu.intel.com/monitoring")

SHOWN_BY_ANY = embedded_only("the configuration is under test, the kubelet only shows what came of it")


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "tree")
    node.plug_gpu()
    node.plug_npu()
    return node


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file in its own directory, as in a mounted ConfigMap."""
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc/config.yaml"
    path.write_text("")
    return path


def shares(count: int) -> str:
    return f"plugins: {{gpu: {{shared-dev-num: {count}}}}}\n"


@SHOWN_BY_ANY
async def test_options_come_from_the_file_and_follow_it(run: Run, kubelet: Kubelet, config: Path) -> None:
    config.write_text(shares(3))
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (3, 3), ACCEL: (1, 1)})
    config.write_text(shares(5))
    await kubelet.until(lambda resources: resources == {I915: (5, 5), ACCEL: (1, 1)})
    config.write_text("plugins: {gpu: {enable-monitoring: true}}")
    await kubelet.until(lambda resources: resources.keys() == {I915, *MONITORING, ACCEL})
    assert await process.terminate() == 0


@SHOWN_BY_ANY
async def test_a_file_that_an_editor_replaces_is_followed(run: Run, kubelet: Kubelet, config: Path) -> None:
    run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    for count in (2, 3):
        (config.parent / ".config.yaml.swp").write_text(shares(count))
        os.rename(config.parent / ".config.yaml.swp", config)
        await kubelet.until(lambda resources, n=count: resources[I915] == (n, n))


@SHOWN_BY_ANY
async def test_a_config_map_is_followed_through_its_swapped_links(run: Run, kubelet: Kubelet, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    for number in (1, 2, 3):
        (mount / f"..{number}").mkdir(parents=True)
        (mount / f"..{number}/config.yaml").write_text(shares(number))
    (mount / "..data").symlink_to("..1")
    (mount / "config.yaml").symlink_to("..data/config.yaml")
    run("accelplane", "node", f"--config={mount}/config.yaml")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    for number in (2, 3):
        (mount / "..data_tmp").symlink_to(f"..{number}")
        os.rename(mount / "..data_tmp", mount / "..data")
        await kubelet.until(lambda resources, n=number: resources[I915] == (n, n))


INVALID = (
    ("plugins: {gpu: {shared-dev-num: many}}", "plugins.gpu.shared-dev-num: found a string, expected an integer"),
    (
        "plugins: {gpu: {shared-dev-number: 2}}",
        "plugins.gpu: found the unknown option 'shared-dev-number', expected one of ",
    ),
    ("plugins: {gpu: {shared-dev-num: 0}}", "plugins.gpu: "),
    (
        "plugins: {tpu: {}}",
        "plugins.tpu: no such plugin is installed, expected one of dlb, dsa, fpga, generic, gpu, iaa, npu, onload, qat",
    ),
    (
        "enabled: [tpu]",
        ": enabled: found 'tpu', expected installed plugins: dlb, dsa, fpga, generic, gpu, iaa, npu, onload, qat, sgx",
    ),
    ("health-interval: 0.5", "health-interval: found 0.5, expected 0 or 1 to 3600 seconds"),
    (
        "enable: [gpu]",
        "found the unknown option 'enable', expected one of enabled, plugins, health-interval",
    ),
    ("- gpu", "found a list, expected a mapping"),
    ("plugins: {gpu: [", "not YAML: "),
    ("\0\xff", "not YAML: "),
    ("&a [*a]", ""),
)


@SHOWN_BY_ANY
async def test_an_invalid_configuration_is_rejected_and_the_previous_one_stays_active(
    run: Run, kubelet: Kubelet, config: Path
) -> None:
    config.write_text(shares(2))
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (2, 2), ACCEL: (1, 1)})
    rejected = "new configuration rejected, the previous one stays active: "
    for count, (text, message) in enumerate(INVALID, start=1):
        config.write_text(text)
        await until(lambda count=count: process.log().count(rejected) == count, 30)
        error = process.log().rpartition(rejected)[2]
        assert message in error
        assert "Traceback" not in error
        assert kubelet.resources() == {I915: (2, 2), ACCEL: (1, 1)}
    config.write_text(shares(3))
    await kubelet.until(lambda resources: resources == {I915: (3, 3), ACCEL: (1, 1)})


@SHOWN_BY_ANY
async def test_a_removed_file_keeps_the_previous_configuration_active(run: Run, kubelet: Kubelet, config: Path) -> None:
    config.write_text(shares(2))
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (2, 2), ACCEL: (1, 1)})
    config.unlink()
    await process.wait_for_log(f"stays active: {config}: No such file or directory")
    config.write_text(shares(3))
    await kubelet.until(lambda resources: resources == {I915: (3, 3), ACCEL: (1, 1)})


def test_a_wrong_configuration_at_the_start_ends_the_process(config: Path, directory: str, tmp_path: Path) -> None:
    config.write_text("{enabled: [gpu], plugins: {gpu: {shared-dev-num: many}}}")
    result = run_main(main, f"--config={config}", f"--root={tmp_path}", f"--kubelet-dir={directory}")
    assert result.returncode == 1
    assert result.stderr == (
        f"accelplane node: {config}: plugins.gpu.shared-dev-num: found a string, expected an integer\n"
    )


@SHOWN_BY_ANY
async def test_plugins_are_enabled_and_disabled_while_the_agent_runs(run: Run, kubelet: Kubelet, config: Path) -> None:
    config.write_text("enabled: [npu]")
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {ACCEL: (1, 1)})
    config.write_text("enabled: [npu, gpu]")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    config.write_text("enabled: [gpu]")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 0)})
    await until(lambda: not os.path.exists(f"{kubelet.directory}/device-plugins/npu.intel.com-accel.sock"))
    config.write_text("enabled: []")
    await kubelet.until(lambda resources: resources == {I915: (1, 0), ACCEL: (1, 0)})
    config.write_text("")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    assert await process.terminate() == 0


@SHOWN_BY_ANY
async def test_plugins_of_the_command_line_have_priority_over_the_file(
    run: Run, kubelet: Kubelet, config: Path
) -> None:
    config.write_text("enabled: [npu]\n" + shares(2))
    process = run("accelplane", "node", "--plugins=gpu", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    config.write_text("enabled: [npu]\n" + shares(3))
    await kubelet.until(lambda resources: resources == {I915: (3, 3)})
    assert await process.terminate() == 0


async def test_pods_keep_their_devices_when_options_change(run: Run, kubelet: Kubelet, config: Path) -> None:
    config.write_text(shares(2))
    process = run("accelplane", "node", f"--config={config}", "-v=1")
    await kubelet.until(lambda resources: resources == {I915: (2, 2), ACCEL: (1, 1)})
    await kubelet.run_pod("pod", {I915: 1})
    config.write_text("plugins: {gpu: {shared-dev-num: 2, allocation-policy: packed}}")
    await process.wait_for_log("plugin gpu has new options")
    container = await kubelet.run_pod("next", {I915: 1})
    assert len(container.devices) == 2
    assert kubelet.resources() == {I915: (2, 2), ACCEL: (1, 1)}


@SHOWN_BY_ANY
async def test_other_times_disturb_no_plugin(run: Run, kubelet: Kubelet, config: Path, directory: str) -> None:
    run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    socket = Path(directory, "device-plugins/gpu.intel.com-i915.sock")
    before = socket.stat()
    config.write_text("enabled: [gpu]\nhealth-interval: 7\nscan-grace: 8\n")
    await kubelet.until(lambda resources: resources[ACCEL][1] == 0)
    await until(lambda: kubelet.resources()[I915] == (1, 1))
    assert socket.stat().st_ino == before.st_ino


@SHOWN_BY_ANY
async def test_a_fifo_instead_of_the_file_does_not_block_the_agent(run: Run, kubelet: Kubelet, config: Path) -> None:
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    os.mkfifo(config.parent / "pipe")
    os.rename(config.parent / "pipe", config)
    await process.wait_for_log(f"{config}: not a regular file")
    assert kubelet.resources() == {I915: (1, 1), ACCEL: (1, 1)}
    assert await process.terminate() == 0


class SlowToStop(Plugin[Config]):
    """A plugin that stops slowly."""

    namespace = "clinging.example.com"

    def __init__(self) -> None:
        super().__init__()
        self.ending, self.released = asyncio.Event(), asyncio.Event()

    def scan(self, host: Host) -> Iterator[Device]:
        yield Device(resource="limpet", id="l0", topology=None)

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.released.wait()


@SHOWN_BY_ANY
async def test_a_plugin_disabled_during_shutdown_leaves_no_socket(
    config: Path, directory: str, kubelet: Kubelet
) -> None:
    plugin = SlowToStop()
    settings = Settings(root=str(config.parent), kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    agent = Agent(settings, {"clinging": plugin}, config_file=str(config), reload=lambda: (settings, {}))
    task = asyncio.create_task(agent.run())
    await kubelet.until(lambda resources: resources == {"clinging.example.com/limpet": (1, 1)})
    config.write_text("enabled: []\n")
    await plugin.ending.wait()
    agent.stop()
    await asyncio.sleep(0)
    plugin.released.set()
    await task
    assert [name for name in os.listdir(f"{directory}/device-plugins") if name.startswith("clinging")] == []


@SHOWN_BY_ANY
async def test_a_file_behind_a_link_is_followed_by_the_slow_timer(
    tmp_path: Path, config: Path, directory: str, kubelet: Kubelet
) -> None:
    (tmp_path / "elsewhere.yaml").write_text("1")
    config.unlink()
    config.symlink_to("../elsewhere.yaml")
    settings = Settings(root=str(tmp_path / "tree"), kubelet_dir=directory, cdi_dir=directory, safety_interval=0.1)
    read: list[str] = []

    def reload() -> tuple[Settings, Mapping[str, Plugin[Config]]]:
        read.append(config.read_text())
        return settings, {}

    agent = Agent(settings, {}, config_file=str(config), reload=reload)
    task = asyncio.create_task(agent.run())
    (tmp_path / "elsewhere.yaml").write_text("22")
    await until(lambda: read == ["22"])
    agent.stop()
    await task
