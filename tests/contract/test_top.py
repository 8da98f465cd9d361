"""`accelplane top` and the outputs of `inspect` as an administrator calls them: on simulated nodes, with a kubelet."""

import asyncio
import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Start
from kubelets import Embedded
from msgspec.structs import replace
from processes import run_command
from trees import write

from accelplane import simulate
from accelplane.http.messages import PAGE_LIMITS, Request, Response
from accelplane.http.server import HttpServer
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate import GpuSpec, NodeSpec, SimulatedNode
from accelplane.simulate.offload import FpgaSpec

pytestmark = pytest.mark.memory

I915 = "gpu.intel.com/i915"
EVERY_KIND = Path(simulate.__file__).with_name("configs") / "demo.yaml"


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("accelplane", *arguments)


def top(root: Path, directory: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call("top", "--once", "--root", str(root), "--kubelet-dir", directory, *arguments)


def rows(root: Path, directory: str, *arguments: str) -> dict[str, Any]:
    answer = top(root, directory, "-o", "json", *arguments)
    return {row["device"]: row for row in json.loads(answer.stdout)["devices"]}


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The PCI directory of the only GPU, which is awake and has sensors."""
    node = SimulatedNode(tmp_path)
    node.plug_gpu(GpuSpec())
    function = tmp_path / node.device("card0").path.removeprefix("/")
    write(function / "power/runtime_status", "active\n")
    write(function / "power/control", "auto\n")
    write(function / "hwmon/hwmon0/name", "i915\n")
    write(function / "hwmon/hwmon0/temp1_input", "45000\n")
    write(function / "hwmon/hwmon0/power1_max", "120000000\n")
    return function


def test_every_kind_of_device_has_a_row_in_json_and_csv(tmp_path: Path, directory: str) -> None:
    SimulatedNode(tmp_path).build(replace(NodeSpec.load(EVERY_KIND), fpgas=(FpgaSpec(),)))
    answer = top(tmp_path, directory, "-o", "json")
    report = json.loads(answer.stdout)
    assert (report["apiVersion"], report["kind"]) == ("accelplane/v1", "DeviceUseList")
    kinds = {row["plugin"] for row in report["devices"]}
    assert {"gpu", "npu", "qat", "dsa", "iaa", "dlb", "fpga", "sgx"} <= kinds
    table = list(csv.DictReader(io.StringIO(top(tmp_path, directory, "-o", "csv").stdout)))
    assert [row["DEVICE"] for row in table] == [row["device"] for row in report["devices"]]


def test_a_device_shows_its_readings(card: Path, tmp_path: Path, directory: str) -> None:
    found = rows(tmp_path, directory)["card0"]
    assert (found["state"], found["awake"]) == (None, True)
    assert (found["temperature_celsius"], found["power_limit_watts"]) == (45.0, 120.0)
    assert found["power_watts"] is None


def test_a_sleeping_device_is_not_read_unless_that_is_requested(card: Path, tmp_path: Path, directory: str) -> None:
    write(card / "power/runtime_status", "suspended\n")
    asleep = rows(tmp_path, directory)["card0"]
    assert (asleep["awake"], asleep["temperature_celsius"]) == (False, None)
    (line,) = [line for line in top(tmp_path, directory).stdout.splitlines() if "card0" in line]
    assert line.split()[4:10] == ["z"] * 6
    assert rows(tmp_path, directory, "--wake")["card0"]["temperature_celsius"] == 45.0


async def test_an_allocated_device_has_the_name_of_its_container(
    card: Path, tmp_path: Path, directory: str, start_agent: Start
) -> None:
    kubelet = Embedded(directory)
    await kubelet.start()
    await start_agent(gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(I915) == (1, 1))
    await kubelet.run_pod("worker", {I915: 1})
    found = await asyncio.to_thread(rows, tmp_path, directory)
    assert found["card0"]["holders"] == ["default/worker/main"]
    await kubelet.kill()


def test_many_units_without_readings_share_a_row(tmp_path: Path, directory: str) -> None:
    for name in ("sgx_enclave", "sgx_provision"):
        write(tmp_path / "dev" / name, "")
    found = rows(tmp_path, directory)
    assert found["sgx-enclave"]["ids"] == 110


def test_live_output_that_is_not_a_terminal_is_one_table_after_the_other(
    card: Path, tmp_path: Path, directory: str
) -> None:
    command = os.path.join(os.path.dirname(sys.executable), "accelplane")
    arguments = ["top", "--interval", "0.2", "--root", str(tmp_path), "--kubelet-dir", directory, "--no-headers"]
    arguments += ["--plugins", "gpu"]
    with subprocess.Popen([command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.terminate()
    assert [line.split()[1] for line in lines[::2]] == ["card0"] * 3
    assert all(line.startswith("gpu: no agent answers") for line in lines[1::2]), lines
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_the_table_is_redrawn_in_place_until_it_is_interrupted(
    card: Path, tmp_path: Path, directory: str
) -> None:
    command = os.path.join(os.path.dirname(sys.executable), "accelplane")
    arguments = ["top", "--interval", "0.2", "--root", str(tmp_path), "--kubelet-dir", directory]
    controller_end, terminal = os.openpty()
    environment = os.environ | {"TERM": "xterm", "LINES": "24", "COLUMNS": "100"}
    with subprocess.Popen([command, *arguments], stdout=terminal, env=environment) as process:
        os.close(terminal)
        text = b""
        while text.count(b"\x1b[H") < 3:
            text += os.read(controller_end, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    os.close(controller_end)
    assert text.count(b"PLUGIN") >= 2
    assert text.count(b"\x1b[2J") == 1


def test_unreadable_data_is_reported_and_other_data_is_shown(tmp_path: Path, directory: str) -> None:
    SimulatedNode(tmp_path).plug_gpu()
    write(tmp_path / "sys/class/accel", "not a directory")
    path = Path(directory, "pod-resources/kubelet.sock")
    path.parent.mkdir()
    write(path, "no socket")
    answer = top(tmp_path, directory)
    assert answer.returncode == 1
    assert f"{path}: no answer of the kubelet" in answer.stderr
    assert "card0" in answer.stdout


def test_a_kubelet_that_does_not_answer_is_reported(card: Path, tmp_path: Path, directory: str) -> None:
    socket_path = Path(directory, "pod-resources/kubelet.sock")
    socket_path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        answer = top(tmp_path, directory, "--plugins", "gpu")
    assert answer.returncode == 1
    assert f"accelplane top: {socket_path}: no answer of the kubelet; holders may be missing\n" in answer.stderr
    assert "card0" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("top", "--sort-by", "AGE"), "--sort-by: found 'AGE'"),
        (("inspect", "--sort-by", "AGE"), "--sort-by: found 'AGE'"),
        (("top", "--interval", "0"), "--interval"),
        (("top", "--waiting"), "--waiting: found without --cluster, expected both"),
        (("inspect", "--cluster", "--root", "/"), "--root: found with --cluster"),
        (("inspect", "--cluster", "--interval", "2"), "--interval: found without --watch, expected both"),
        (("inspect", "-o", "xml"), "'xml'"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_the_reason(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, directory: str
) -> None:
    place = () if "--cluster" in arguments else ("--root", str(tmp_path), "--kubelet-dir", directory)
    answer = call(*arguments, *place)
    assert answer.returncode == 2
    assert problem in answer.stderr


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "-o", "json"), ("top", "--once")])
def test_output_that_cannot_be_written_is_one_line(
    card: Path, tmp_path: Path, directory: str, command: tuple[str, ...]
) -> None:
    program = os.path.join(os.path.dirname(sys.executable), "accelplane")
    place = ("--root", str(tmp_path), "--kubelet-dir", directory)
    with open("/dev/full", "w", encoding="utf-8") as full:
        answer = subprocess.run(
            [program, *command, *place], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert answer.returncode == 1
    assert answer.stderr == f"accelplane {command[0]}: standard output: No space left on device\n"


def test_inspect_has_the_same_devices_in_every_output(card: Path, tmp_path: Path, directory: str) -> None:
    place = ("inspect", "--root", str(tmp_path), "--kubelet-dir", directory)
    report = json.loads(call(*place, "-o", "json").stdout)
    assert (report["apiVersion"], report["kind"]) == ("accelplane/v1", "NodeDeviceList")
    assert yaml.safe_load(call(*place, "-o", "yaml").stdout) == report
    assert call(*place, "-o", "name").stdout == f"{I915}/card0-0\n"
    (row,) = csv.DictReader(io.StringIO(call(*place, "-o", "csv").stdout))
    assert (row["RESOURCE"], row["DEVICE"], row["HOLDER SINCE"]) == (I915, "card0-0", "-")
    assert "HEALTH" not in call(*place, "--no-headers").stdout
    assert "STATE SINCE" in call(*place, "-o", "wide").stdout


async def test_wide_shows_since_when_a_pod_holds_a_device(
    card: Path, tmp_path: Path, directory: str, start_agent: Start
) -> None:
    kubelet = Embedded(directory)
    await kubelet.start()
    await start_agent(gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(I915) == (1, 1))
    await kubelet.run_pod("worker", {I915: 1})
    recorded = json.loads(Path(directory, "device-plugins/kubelet_internal_checkpoint").read_text())
    (entry,) = recorded["Data"]["PodDeviceEntries"]
    instance = Path(directory, "pods", entry["PodUID"], "plugins")
    instance.mkdir(parents=True)
    os.utime(instance, (1_700_000_000, 1_700_000_000))
    place = ("inspect", "--root", str(tmp_path), "--kubelet-dir", directory)
    wide = await asyncio.to_thread(call, *place, "-o", "wide")
    assert "2023-11-14T22:13:20Z" in wide.stdout
    await kubelet.kill()


UNIT = {"plugin": "gpu", "unit": "card0", "phase": "unhealthy", "since": 1_700_000_000.5, "text": "too hot"}
INVENTORY = {
    "version": 1, "node": "", "agent": "", "versions": {}, "generation": "1",
    "plugins": [{"name": "gpu", "resources": [], "units": [UNIT], "skipped": []}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "since", "problem"),
    [
        (Response(200, json.dumps(INVENTORY).encode()), "2023-11-14T22:13:20Z", ""),
        (Response(200, b'{"plugins": []}'), None, "inventory: Object missing required field"),
        (Response(200, b"\xff"), None, "inventory: JSON is malformed"),
        (Response(404, b""), None, "found status 404, expected 200"),
    ],
    ids=["inventory", "other type", "not text", "not found"],
)
async def test_the_time_of_a_state_is_that_of_the_agents_history(
    card: Path, directory: str, answer: Response, since: str | None, problem: str
) -> None:
    def page(_request: Request) -> Response:
        return answer

    server = HttpServer(page, PAGE_LIMITS)
    await server.start("127.0.0.1", 0)
    host, port = server.addresses[0]
    root = str(card).partition("/sys/")[0]
    place = ("inspect", "--root", root, "--kubelet-dir", directory, "--agent", f"{host}:{port}")
    report = json.loads((await asyncio.to_thread(call, *place, "-o", "json")).stdout)
    await server.stop(grace=1.0)
    assert [row["state_since"] for row in report["devices"]] == [since]
    assert [row["health"] for row in report["devices"]] == ["Unhealthy" if since else None]
    assert problem in "".join(report["problems"])


def test_an_agent_that_does_not_answer_is_a_problem(card: Path, tmp_path: Path, directory: str) -> None:
    place = ("inspect", "--root", str(tmp_path), "--kubelet-dir", directory)
    answer = call(*place, "--agent", "127.0.0.1:1", "-o", "csv")
    assert answer.returncode == 1
    assert "agent at 127.0.0.1:1: /api/v1/inventory" in answer.stderr
    wrong = call(*place, "--agent", "nonsense")
    assert (wrong.returncode, "expected HOST:PORT" in wrong.stderr) == (2, True)
