"""`accelplane inspect` as an administrator calls it: the installed command, a simulated node, a kubelet."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agentstatuses import serving_status
from conftest import Start
from kubelets import Embedded
from podlists import answering, claim, pods_with_claim
from processes import run_command
from trees import write

from accelplane.kubelet import checkpoint
from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate import GpuSpec, SimulatedNode
from accelplane.simulate.offload import DsaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

I915 = "gpu.intel.com/i915"


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    """Two cards; the first is replaced by a virtual function."""
    node = SimulatedNode(tmp_path)
    node.plug_gpu(GpuSpec(vfs=1))
    node.plug_gpu()
    return node


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("accelplane", "inspect", *arguments)


def as_json(*arguments: str) -> Any:
    return json.loads(inspect("--output", "json", *arguments).stdout)


async def test_the_output_has_devices_resources_and_holders(
    node: SimulatedNode, directory: str, start_agent: Start
) -> None:
    kubelet = Embedded(directory)
    await kubelet.start()
    agent = await start_agent(gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(I915) == (2, 2))
    await kubelet.run_pod("worker", {I915: 2})
    # The command calls this process, which must keep answering.
    words = ("--root", str(node.root), "--kubelet-dir", directory, "--plugins", "gpu")
    async with serving_status(agent):
        answer = await in_background(*words, "--output", "json")
        colored = await asyncio.to_thread(on_terminal, words)
    report = json.loads(answer.stdout)
    assert answer.returncode == 0, answer.stderr
    assert sum("\x1b[32mHealthy\x1b[0m" in line for line in colored) == 2
    assert report["source"] == "pod-resources"
    rows = {row["id"]: row for row in report["devices"]}
    assert sorted(rows) == ["card1-0", "card2-0"]
    assert [row["advertised"] for row in rows.values()] == [True, True]
    assert [row["held_by"] for row in rows.values()] == [["default/worker/main"]] * 2
    (skipped,) = report["skipped"]["gpu"]
    assert skipped["subject"] == "card0"

    node.unplug("card2")
    table = await in_background("--root", str(node.root), "--kubelet-dir", directory)
    (removed,) = [line for line in table.stdout.splitlines() if "card2-0" in line]
    assert "gone" in removed
    await kubelet.kill()


async def test_a_container_with_a_claim_is_reported_for_the_cdi_device(node: SimulatedNode, directory: str) -> None:
    os.makedirs(f"{directory}/pod-resources")
    answers = {
        "List": pods_with_claim(claim("gpu.intel.com", "0000-00-03-0", "intel.cdi.k8s.io/gpu=card1")),
        "GetAllocatableResources": pb.AllocatableResourcesResponse(),
    }
    encoded = {method: answer.SerializeToString() for method, answer in answers.items()}
    words = ("--root", str(node.root), "--kubelet-dir", directory)
    async with answering(f"{directory}/pod-resources/kubelet.sock", **encoded):
        report = json.loads((await in_background(*words, "--output", "json")).stdout)
        result = await asyncio.to_thread(run_command, "accelplane", "top", *words, "--once", "-o", "json")
    assert {row["id"]: row["held_by"] for row in report["devices"]} == {
        "card1-0": ["team/pod/main (DRA)"], "card2-0": [],
    }  # fmt: skip
    holders = {row["device"]: row["holders"] for row in json.loads(result.stdout)["devices"]}
    assert holders == {"card1": ["team/pod/main (DRA)"], "card2": []}


async def test_a_container_that_is_allocated_during_the_call_has_a_time(node: SimulatedNode, directory: str) -> None:
    for name in ("pod-resources", "device-plugins", "pods/uid/plugins"):
        os.makedirs(f"{directory}/{name}")
    os.utime(f"{directory}/pods/uid/plugins", (1_700_000_000, 1_700_000_000))

    def allocate_and_list() -> bytes:
        holding = checkpoint.Holding("uid", "main", I915, {-1: ("card1-0",)}, b"")
        checkpoint.write_checkpoint(f"{directory}/device-plugins", checkpoint.Checkpoint((holding,)))
        container = pb.ContainerResources(
            name="main", devices=[pb.ContainerDevices(resource_name=I915, device_ids=["card1-0"])]
        )
        pod = pb.PodResources(name="worker", namespace="default", containers=[container])
        return pb.ListPodResourcesResponse(pod_resources=[pod]).SerializeToString()

    answers = {
        "List": allocate_and_list,
        "GetAllocatableResources": pb.AllocatableResourcesResponse().SerializeToString(),
    }
    words = ("--root", str(node.root), "--kubelet-dir", directory, "--output", "json")
    async with answering(f"{directory}/pod-resources/kubelet.sock", **answers):
        report = json.loads((await in_background(*words)).stdout)
    times = {row["id"]: row["held_since"] for row in report["devices"]}
    assert times == {"card1-0": "2023-11-14T22:13:20Z", "card2-0": None}


async def in_background(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(inspect, *arguments)


async def test_holders_are_read_from_the_checkpoint_of_a_stopped_kubelet(
    node: SimulatedNode, directory: str, start_agent: Start
) -> None:
    kubelet = Embedded(directory)
    await kubelet.start()
    await start_agent(gpu=GpuPlugin())
    await kubelet.until(lambda resources: resources.get(I915) == (2, 2))
    await kubelet.run_pod("worker", {I915: 2})
    await kubelet.kill()
    os.unlink(f"{directory}/pod-resources/kubelet.sock")
    report = as_json("--root", str(node.root), "--kubelet-dir", directory)
    assert report["source"] == "checkpoint"
    assert all(row["held_by"][0].startswith("pod uid ") for row in report["devices"])


def test_each_device_has_the_model_and_the_attributes_of_its_unit(tmp_path: Path) -> None:
    SimulatedNode(tmp_path).build(
        NodeSpec(gpus=[GpuSpec(bdf="0000:03:00.0")], dsas=[DsaSpec(bdf="0000:6a:01.0", queues=[QueueSpec()])])
    )
    words = ("--root", str(tmp_path), "--plugins", "gpu,dsa")
    rows = {row["plugin"]: row for row in as_json(*words)["devices"]}
    assert {name: (row["unit_id"], row["model"]) for name, row in rows.items()} == {
        "gpu": ("0000:03:00.0", "Data Center GPU Flex 170"),
        "dsa": ("0000:6a:01.0-wq0", "Data Streaming Accelerator (DSA)"),
    }
    attributes = rows["dsa"]["unit_attributes"]
    assert (attributes["resource.kubernetes.io/numaNode"], attributes["type"]) == (0, "user")
    wide = inspect(*words, "--output", "wide").stdout.splitlines()
    assert wide[0].endswith("MODEL")
    [line] = [line for line in wide if "wq0.0" in line]
    assert line.endswith("Data Streaming Accelerator (DSA)")
    assert "0000:6a:01.0" in line


def test_mode_and_group_of_device_nodes_are_reported(node: SimulatedNode, directory: str) -> None:
    render = Path(node.root, "dev/dri/renderD130")
    render.chmod(0o640)
    place = ("--root", str(node.root), "--kubelet-dir", directory)
    rows = {row["id"]: row for row in as_json(*place)["devices"]}
    expected = {"path": "/dev/dri/renderD130", "mode": "0640", "gid": render.stat().st_gid}
    assert expected in rows["card2-0"]["nodes"]
    assert f"/dev/dri/renderD130 0640 group {expected['gid']}" in inspect(*place, "-o", "wide").stdout
    assert "group" not in inspect(*place).stdout


def test_unknown_values_are_reported_without_a_kubelet(node: SimulatedNode, directory: str) -> None:
    answer = inspect("--root", str(node.root), "--kubelet-dir", directory)
    assert answer.returncode == 1
    assert "No kubelet answers" in answer.stdout
    assert "card1-0" in answer.stdout
    assert "card0" in answer.stdout
    assert "virtual functions" in answer.stdout


def test_brackets_in_a_path_are_text(node: SimulatedNode, tmp_path: Path) -> None:
    answer = inspect("--root", str(node.root), "--kubelet-dir", str(tmp_path / "[/red]"))
    assert (answer.returncode, answer.stderr) == (1, "")
    assert f"No kubelet answers under {tmp_path}/[/red]: " in answer.stdout


@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_terminal_of_any_width_has_one_line_for_each_device(
    node: SimulatedNode, directory: str, columns: str
) -> None:
    lines = on_terminal(("--root", str(node.root), "--kubelet-dir", directory, "--plugins", "gpu"), columns)
    assert sum("gpu.intel.com/i915   card" in line for line in lines) == 2
    assert all(line == line.rstrip() for line in lines)


def on_terminal(words: Sequence[str], columns: str = "200") -> Sequence[str]:
    """The lines that the command writes to a terminal."""
    controller_end, terminal = os.openpty()
    command = os.path.join(os.path.dirname(sys.executable), "accelplane")
    environment = os.environ | {"TERM": "xterm", "COLUMNS": columns, "NO_COLOR": ""}
    subprocess.run([command, "inspect", *words], stdout=terminal, env=environment, check=False)
    os.close(terminal)
    lines = os.read(controller_end, 65536).decode().splitlines()
    os.close(controller_end)
    return lines


def test_equal_free_ids_share_a_line(tmp_path: Path, directory: str) -> None:
    for name in ("sgx_enclave", "sgx_provision"):
        write(tmp_path / "dev" / name, "")
    lines = inspect("--root", str(tmp_path), "--kubelet-dir", directory).stdout.splitlines()
    assert sum("sgx-enclave-0 … sgx-enclave-109 (110)" in line for line in lines) == 1
    assert sum("sgx.intel.com/" in line for line in lines) == 2


@pytest.mark.parametrize("interpreter", [False, True])
def test_a_node_without_devices_is_not_an_error(tmp_path: Path, directory: str, interpreter: bool) -> None:
    words = ("inspect", "--root", str(tmp_path), "--kubelet-dir", directory)
    answer = run_command("accelplane", *words, interpreter=interpreter)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "No devices found" in answer.stdout


def test_an_invalid_checkpoint_and_a_failed_scan_are_reported_and_other_data_is_shown(
    node: SimulatedNode, directory: str
) -> None:
    os.makedirs(f"{directory}/device-plugins")
    Path(directory, "device-plugins/kubelet_internal_checkpoint").write_text("{")
    Path(node.root, "sys/class/accel").write_text("")
    report = as_json("--root", str(node.root), "--kubelet-dir", directory)
    assert {row["id"] for row in report["devices"]} == {"card1-0", "card2-0"}
    assert any("kubelet_internal_checkpoint" in problem for problem in report["problems"])
    assert any("/sys/class/accel" in problem for problem in report["problems"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plugins", "tpu"], "--plugins: found 'tpu', expected installed plugins: dlb, "),
        (["--config", "/nowhere/config.yaml"], "/nowhere/config.yaml"),
        (["--root", "/nowhere"], "/nowhere"),
    ],
)
def test_invalid_options_are_reported(tmp_path: Path, arguments: list[str], named: str) -> None:
    answer = inspect("--root", str(tmp_path), *arguments)
    assert answer.returncode == 1
    assert named in answer.stderr
    assert "Traceback" not in answer.stderr
