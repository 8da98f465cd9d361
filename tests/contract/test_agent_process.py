"""The agent as a process: start, messages, shutdown, and two agents on one node."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
from pathlib import Path

import pytest
from conftest import Run
from kubelets import Kubelet
from processes import Process, installed_plugin, run_command, run_main
from waiting import until

from accelplane.cli import node
from accelplane.simulate.tree import GpuSpec, SimulatedNode

pytestmark = pytest.mark.memory

I915, ACCEL = "gpu.intel.com/i915", "npu.intel.com/accel"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a card and an NPU."""
    root = tmp_path / "tree"
    simulated = SimulatedNode(root)
    simulated.plug_gpu()
    simulated.plug_npu()
    return root


def own_sockets(directory: str) -> list[str]:
    """The names of the plugins' sockets, in those of registrations N stands for the suffix."""
    names = os.listdir(os.path.join(directory, "device-plugins"))
    plugins = sorted(name for name in names if name.endswith(".sock") and name != "kubelet.sock")
    return [re.sub(r"-[0-9a-f]{6}\.sock$", "-N.sock", name) for name in plugins]


# Start and shutdown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_ends_the_process_with_0_and_removes_its_sockets(
    run: Run, kubelet: Kubelet, tree: Path, number: signal.Signals
) -> None:
    process = run("accelplane", "node", interpreter=True)
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    assert own_sockets(kubelet.directory) == [
        "gpu.intel.com-i915-N.sock",
        "gpu.intel.com-i915.sock",
        "npu.intel.com-accel-N.sock",
        "npu.intel.com-accel.sock",
    ]
    process.send(number)
    assert await process.exit_code() == 0
    assert own_sockets(kubelet.directory) == []
    await kubelet.until(lambda resources: resources == {I915: (1, 0), ACCEL: (1, 0)})


async def test_a_signal_ends_a_process_that_waits_for_a_kubelet(run: Run, directory: str, tree: Path) -> None:
    shutil.rmtree(directory)
    process = run("accelplane", "node")
    await process.wait_for_log(f"{directory} does not exist, waiting for the kubelet to create it")
    assert await process.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_during_the_import_of_plugins_ends_the_process_with_0_and_no_output(
    run: Run, tmp_path: Path, number: signal.Signals
) -> None:
    source = "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    process = run("accelplane", "node", env=installed_plugin(tmp_path, "sluggard", source), interpreter=True)
    await process.wait_for_log("importing\n")  # Python writes the line and its end one after the other
    process.send(number)
    assert await process.exit_code() == 0
    assert process.log() == "importing\n"


@pytest.mark.parametrize(
    ("command", "resource"), [("intel_gpu_device_plugin", I915), ("intel_npu_device_plugin", ACCEL)]
)
async def test_a_drop_in_command_serves_its_own_family_only(
    run: Run, kubelet: Kubelet, tree: Path, command: str, resource: str
) -> None:
    process = run(command, "-v", "1", "-shared-dev-num=3", interpreter=True)
    await kubelet.until(lambda resources: resources == {resource: (3, 3)})
    await process.wait_for_log(f"{resource}: registered")
    assert await process.terminate() == 0


async def test_wsl_without_the_levelzero_service_is_reported_in_one_line(run: Run, kubelet: Kubelet) -> None:
    process = run("intel_gpu_device_plugin", "-wsl")
    await process.wait_for_log("gpu: scan failed: Level-Zero service at ")
    assert await process.terminate() == 0
    assert "Traceback" not in process.log()


async def test_an_agent_that_starts_later_takes_over_and_the_earlier_one_serves_again_after_its_end(
    run: Run, kubelet: Kubelet, tree: Path
) -> None:
    first = run("intel_gpu_device_plugin", interpreter=True)
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    second = run("intel_gpu_device_plugin", "-shared-dev-num=2", interpreter=True)
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    await first.wait_for_log(f"gpu.intel.com-i915.sock is in use by process {second.pid}")
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    second.kill()
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    assert own_sockets(kubelet.directory) == ["gpu.intel.com-i915-N.sock", "gpu.intel.com-i915.sock"]
    assert await first.terminate() == 0


async def test_the_end_of_the_earlier_agent_changes_nothing(run: Run, kubelet: Kubelet, tree: Path) -> None:
    first = run("intel_gpu_device_plugin", interpreter=True)
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    second = run("intel_gpu_device_plugin", "-shared-dev-num=2", interpreter=True)
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    assert await first.terminate() == 0
    await until(lambda: "gpu.intel.com-i915-N.sock" in own_sockets(kubelet.directory))
    await kubelet.until(lambda resources: resources == {I915: (2, 2)})
    assert await second.terminate() == 0


async def test_agents_of_different_families_share_the_directory(run: Run, kubelet: Kubelet, tree: Path) -> None:
    gpu, other = run("intel_gpu_device_plugin"), run("intel_npu_device_plugin")
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    await kubelet.restart()
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    assert await gpu.terminate() == 0
    await kubelet.until(lambda resources: resources == {I915: (1, 0), ACCEL: (1, 1)})
    assert await other.terminate() == 0


async def test_a_killed_agent_is_replaced_by_its_next_instance(run: Run, kubelet: Kubelet, tree: Path) -> None:
    first = run("intel_gpu_device_plugin")
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    first.kill()
    sockets = ["gpu.intel.com-i915-N.sock", "gpu.intel.com-i915.sock"]
    assert own_sockets(kubelet.directory) == sockets, "no process removed them"
    await kubelet.until(lambda resources: resources == {I915: (1, 0)})
    run("intel_gpu_device_plugin")
    await kubelet.until(lambda resources: resources == {I915: (1, 1)})
    assert own_sockets(kubelet.directory) == sockets, "those of the killed one are removed"


async def test_the_socket_of_a_process_is_accessible_only_to_its_owner(run: Run, kubelet: Kubelet, tree: Path) -> None:
    process = run("intel_gpu_device_plugin")
    await kubelet.until(lambda resources: I915 in resources)
    mode = os.stat(f"{kubelet.directory}/device-plugins/gpu.intel.com-i915.sock").st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    assert await process.terminate() == 0


# Invalid arguments


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--kubelet-dir=/dev/null"],
            1,
            "accelplane node: -kubelet-dir: /dev/null: not a directory",
        ),
        (["--kubelet-dir=/" + "x" * 100], 1, f"/{'x' * 100}/device-plugins/kubelet.sock: a socket path of 129 bytes"),
        (["--root=/nowhere"], 1, "-root: /nowhere: not a directory, expected one with sys/ and dev/"),
        (["--root="], 1, "-root: found nothing, expected a directory"),
        (["--kubelet-dir="], 1, "-kubelet-dir: found nothing, expected a directory"),
        (["--cdi-dir="], 1, "-cdi-dir: found nothing, expected a directory"),
        (
            ["--logtostderr=false", "--log_file=/nowhere/log"],
            1,
            "accelplane node: /nowhere/log: No such file or directory",
        ),
        (
            ["--plugins=gpu,tpu"],
            1,
            "-plugins: found 'tpu', expected installed plugins: dlb, dsa, fpga, generic, gpu, iaa, npu, onload, qat",
        ),
        (
            ["--config=/nowhere/config.yaml"],
            1,
            "/nowhere/config.yaml: No such file or directory, expected the YAML file of --config",
        ),
        (["--health-interval=0.5"], 1, "-health-interval: found 0.5, expected 0 or 1 to 3600 seconds"),
        (["--scan-grace=-1"], 1, "-scan-grace: found -1, expected 0 to 3600 seconds"),
        (["--log-format=xml"], 1, "-log-format: found 'xml', expected text or json"),
        (["--no-such-flag"], 2, "flag provided but not defined: -no-such-flag"),
        (["word"], 2, "unexpected argument 'word'"),
        (["--config"], 2, "flag needs an argument: -config"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    directory: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = run_main(node.main, f"--root={tmp_path}", f"--kubelet-dir={directory}", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if code == 1:
        assert len(result.stderr.splitlines()) == 1


def test_invalid_options_are_rejected_as_by_the_drop_in_command(directory: str, tmp_path: Path) -> None:
    result = run_command(
        "intel_gpu_device_plugin", f"--root={tmp_path}", f"--kubelet-dir={directory}", "-shared-dev-num=0",
        interpreter=True,
    )  # fmt: skip
    assert result.returncode == 1
    assert "Argument check failed: " in result.stderr
    assert len(result.stderr.splitlines()) == 1


async def test_a_directory_without_write_permission_is_rejected_with_its_path(
    run: Run, directory: str, tree: Path
) -> None:
    plugins = Path(directory, "device-plugins")
    plugins.mkdir(mode=0o555)
    process = run("intel_gpu_device_plugin", powerless=True)
    assert await process.exit_code() == 1
    expected = f"-kubelet-dir: {plugins}: not writable by uid {os.geteuid()}, expected a directory in which "
    assert expected in process.log().splitlines()[-1]


async def test_a_directory_that_becomes_read_only_is_reported_and_retried(run: Run, directory: str, tree: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to remove files of the process")
    plugins = Path(directory, "device-plugins")
    plugins.mkdir()
    process = run("intel_gpu_device_plugin", powerless=True)
    own = plugins / "gpu.intel.com-i915.sock"
    await until(own.exists)
    plugins.chmod(0o555)
    own.unlink()
    await process.wait_for_log(f"cannot create the socket {own}: Permission denied", 20)
    plugins.chmod(0o755)
    (plugins / "wake").touch()
    await until(own.exists)
    assert await process.terminate() == 0


async def test_a_resource_whose_path_is_too_long_does_not_stop_the_other_plugins(
    run: Run, kubelet: Kubelet, tree: Path, tmp_path: Path
) -> None:
    source = """
from accelplane.devices import Device
from accelplane.plugins import Plugin

class ThePlugin(Plugin):
    namespace = "x" * 60 + ".example.com"

    def scan(self, host):
        yield Device(resource="y" * 40, id="a", topology=None)
"""
    env = installed_plugin(tmp_path / "site", "long", source)
    process = run("accelplane", "node", env=env)
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    await process.wait_for_log("at most 107 are possible")
    assert await process.terminate() == 0


async def test_a_plugin_that_cannot_be_loaded_is_skipped_and_an_error_without_others(
    run: Run, kubelet: Kubelet, tree: Path, tmp_path: Path
) -> None:
    env = installed_plugin(tmp_path / "site", "broken", "raise ImportError('no libgadget here')")
    process = run("accelplane", "node", env=env)
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    await process.wait_for_log("plugin broken cannot be loaded and is skipped")
    assert await process.terminate() == 0
    process = run("accelplane", "node", "--plugins=broken", env=env, interpreter=True)
    assert await process.exit_code() == 1
    assert process.log().endswith("cannot be loaded: ImportError: no libgadget here\n")


# Messages


async def test_the_log_may_be_json_with_one_object_a_line(run: Run, kubelet: Kubelet, tree: Path) -> None:
    process = run("accelplane", "node", "--log-format=json", "-v=4")
    await kubelet.until(lambda resources: len(resources) == 2)
    assert await process.terminate() == 0
    entries = [json.loads(line) for line in process.log().splitlines()]
    assert any(f"{I915}: registered" in entry["msg"] for entry in entries)
    assert {"ts", "level", "v", "logger", "caller", "msg"} <= entries[0].keys()


async def test_an_idle_agent_logs_little(run: Run, kubelet: Kubelet, tree: Path) -> None:
    process = run("accelplane", "node")
    await kubelet.until(lambda resources: len(resources) == 2)
    await kubelet.restart()
    await kubelet.until(lambda resources: resources == {I915: (1, 1), ACCEL: (1, 1)})
    assert await process.terminate() == 0
    levels = [line[0] for line in process.log().splitlines()]
    assert levels.count("E") == 0, process.log()
    assert len(levels) < 12, process.log()


async def test_the_agent_process_publishes_a_plugged_card_and_removes_an_unplugged_one(
    run: Run, kubelet: Kubelet, tmp_path: Path
) -> None:
    simulated = SimulatedNode(tmp_path / "tree")
    process = run("accelplane", "node")
    await process.wait_for_log("plugins dlb, dsa, fpga, generic, gpu, iaa, npu, onload, qat, sgx")
    simulated.plug_gpu(GpuSpec(driver="xe"))
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/xe": (1, 1)})
    simulated.unplug("card0")
    await kubelet.until(lambda resources: resources == {})
    assert await process.terminate() == 0


async def test_hundreds_of_connections_leave_the_process_responsive(run: Run, kubelet: Kubelet, tree: Path) -> None:
    process: Process = run("intel_gpu_device_plugin")
    await kubelet.until(lambda resources: I915 in resources)
    path = f"{kubelet.directory}/device-plugins/gpu.intel.com-i915.sock"
    clients = [socket.socket(socket.AF_UNIX) for _ in range(400)]
    try:
        for client in clients:
            client.connect(path)
            await asyncio.sleep(0)
        container = await kubelet.run_pod("pod", {I915: 1})
        assert container.device_ids == {I915: ("card0-0",)}
        assert await process.terminate() == 0
    finally:
        for client in clients:
            client.close()
