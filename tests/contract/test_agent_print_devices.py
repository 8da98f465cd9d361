"""One scan of the agent's process: devices as JSON, checks and explanations."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from conftest import Run
from kubelets import Kubelet
from processes import installed_plugin, run_command, run_main
from trees import gpu_card, npu
from waiting import until

from accelplane.cli import node

pytestmark = pytest.mark.memory

I915, ACCEL = "gpu.intel.com/i915", "npu.intel.com/accel"


# One scan


def test_one_scan_prints_the_devices_as_json_and_changes_nothing(directory: str, tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    gpu_card(tmp_path, 1, vendor="0x10de")
    npu(tmp_path, 0)
    result = run_main(node.main, "--once", f"--root={tmp_path}", f"--kubelet-dir={directory}")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    found = {name: sorted(part["resources"]) for name, part in report.items() if part["resources"]}
    assert found == {"gpu": [I915], "npu": [ACCEL]}
    (device,) = report["gpu"]["resources"][I915].values()
    assert (device["id"], device["health"], device["topology"]) == ("card0-0", "Healthy", [0])
    assert [node["host_path"] for node in device["nodes"]] == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert os.listdir(directory) == []


def test_one_scan_of_an_empty_machine_finds_no_devices_and_succeeds(directory: str, tmp_path: Path) -> None:
    result = run_command("intel_gpu_device_plugin", "-dry-run", f"-root={tmp_path}")
    assert (result.returncode, json.loads(result.stdout)["gpu"]["resources"]) == (0, {})


def test_print_devices_reports_a_failed_scan_and_shows_the_other_plugins(tmp_path: Path) -> None:
    npu(tmp_path, 0)
    (tmp_path / "sys/class/drm").symlink_to("drm")
    result = run_main(node.main, "-once", f"-root={tmp_path}")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert "check for a loop" in report["gpu"]["error"]
    assert list(report["npu"]["resources"]) == [ACCEL]


def test_one_scan_with_a_failed_plugin_shows_the_others(tmp_path: Path) -> None:
    source = """
from accelplane.plugins import Plugin

class ThePlugin(Plugin):
    namespace = "broken.example.com"

    def scan(self, host):
        return 1 / 0
"""
    env = installed_plugin(tmp_path / "site", "broken", source)
    npu(tmp_path / "tree", 0)
    result = run_command("accelplane", "node", "-once", f"-root={tmp_path / 'tree'}", env=env)
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert "division by zero" in report["broken"]["error"]
    assert list(report["npu"]["resources"]) == [ACCEL]


PREPARED = """
from accelplane.plugins import Device, DeviceNode, Plugin

class ThePlugin(Plugin):
    namespace = "prepared.example.com"

    def prepare(self, host):
        host.write("/sys/prepared", "1")

    def scan(self, host):
        yield Device(resource="gadget", id="a", nodes=[DeviceNode("/dev/a")], topology=None)
"""


@pytest.mark.parametrize("command", [["node", "-once"], ["node", "-check"], ["inspect"]])
def test_hardware_that_is_only_scanned_is_not_prepared(directory: str, tmp_path: Path, command: Sequence[str]) -> None:
    (tmp_path / "tree/sys").mkdir(parents=True)
    env = installed_plugin(tmp_path / "site", "prepared", PREPARED)
    places = (f"--root={tmp_path / 'tree'}", f"--kubelet-dir={directory}", "--plugins=prepared")
    result = run_command("accelplane", *command, *places, env=env)
    assert "prepared.example.com/gadget" in result.stdout, result.stderr
    assert os.listdir(tmp_path / "tree/sys") == []


async def test_hardware_is_prepared_by_the_agent(run: Run, kubelet: Kubelet, tmp_path: Path) -> None:
    (tmp_path / "tree/sys").mkdir(parents=True)
    env = installed_plugin(tmp_path / "site", "prepared", PREPARED)
    run("accelplane", "node", "--plugins=prepared", env=env)
    await kubelet.until(lambda resources: resources == {"prepared.example.com/gadget": (1, 1)})
    # A further scan may be writing the file now.
    await until(lambda: (tmp_path / "tree/sys/prepared").read_text() == "1")


# Check and explanation


EXPLAINING = """
from accelplane.plugins import Device, DeviceNode, Plugin

class ThePlugin(Plugin):
    namespace = "explained.example.com"

    def scan(self, host):
        if host.exists("/dev/a"):
            yield Device(resource="gadget", id="a", nodes=[DeviceNode("/dev/a")], topology=None)

    def explain(self, host):
        if host.exists("/dev/broken"):
            return {"cause": object()}
        return {"cause": "" if host.exists("/dev/a") else "no driver", "looked-at": ("/dev/a",)}
"""


@pytest.fixture
def explanation_environment(tmp_path: Path) -> Mapping[str, str]:
    """The environment with a plugin `explained`, which wants a `/dev/a` and explains itself."""
    (tmp_path / "tree/dev").mkdir(parents=True)
    return installed_plugin(tmp_path / "site", "explained", EXPLAINING)


@pytest.mark.parametrize(
    ("files", "code", "report"),
    [
        (
            ("a",),
            0,
            {
                "ok": True,
                "devices": {"explained.example.com/gadget": 1},
                "explanation": {"cause": "", "looked-at": ["/dev/a"]},
            },
        ),
        ((), 1, {"ok": False, "devices": {}, "explanation": {"cause": "no driver", "looked-at": ["/dev/a"]}}),
        (
            ("a", "broken"),
            1,
            {
                "ok": False,
                "devices": {"explained.example.com/gadget": 1},
                "errors": ["TypeError: Encoding objects of type object is unsupported"],
            },
        ),
    ],
)
def test_the_check_prints_the_devices_and_the_skipped_hardware(
    tmp_path: Path, explanation_environment: Mapping[str, str], files: Sequence[str], code: int, report: object
) -> None:
    for name in files:
        (tmp_path / "tree/dev" / name).touch()
    result = run_command(
        "accelplane",
        "node",
        "-check",
        "-plugins=explained",
        f"-root={tmp_path / 'tree'}",
        env=explanation_environment,
    )
    assert (json.loads(result.stdout), result.returncode) == ({"explained": report}, code)


def test_the_check_of_several_plugins_succeeds_if_each_has_devices(tmp_path: Path) -> None:
    gpu_card(tmp_path, 0)
    both = ("-check", "-plugins=gpu,npu", f"-root={tmp_path}")
    result = run_main(node.main, *both)
    assert result.returncode == 1
    assert {name: part["ok"] for name, part in json.loads(result.stdout).items()} == {"gpu": True, "npu": False}
    npu(tmp_path, 0)
    assert run_main(node.main, *both).returncode == 0


async def test_a_plugin_logs_its_explanation_once_at_the_start(
    run: Run, kubelet: Kubelet, tmp_path: Path, explanation_environment: Mapping[str, str]
) -> None:
    process = run("accelplane", "node", "--plugins=explained", env=explanation_environment)
    await process.wait_for_log("explained: {")
    (tmp_path / "tree/dev/a").touch()
    await kubelet.until(lambda resources: resources == {"explained.example.com/gadget": (1, 1)})
    assert await process.terminate() == 0
    assert process.log().count('explained: {"cause":"no driver","looked-at":["/dev/a"]}') == 1


async def test_a_plugin_whose_explanation_fails_still_serves_devices(
    run: Run, kubelet: Kubelet, tmp_path: Path, explanation_environment: Mapping[str, str]
) -> None:
    for name in ("a", "broken"):
        (tmp_path / "tree/dev" / name).touch()
    process = run("accelplane", "node", "--plugins=explained", env=explanation_environment)
    await process.wait_for_log("explained: explain failed: Encoding objects of type object is unsupported")
    await kubelet.until(lambda resources: resources == {"explained.example.com/gadget": (1, 1)})
