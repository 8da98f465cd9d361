"""`inspect --cluster` and `kubectl-accelplane` as an administrator calls them, with a double of the API server."""

import asyncio
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubeapi import KubeApi, Object
from processes import run_command

pytestmark = pytest.mark.memory

I915, EXAMPLE = "gpu.intel.com/i915", "example.com/card"


def node(name: str, capacity: int, allocatable: int, *, ready: bool = True, cordoned: bool = False) -> Object:
    def amounts(count: int) -> dict[str, str]:
        return {"cpu": "8", I915: str(count), EXAMPLE: "1"}

    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {
            "capacity": amounts(capacity),
            "allocatable": amounts(allocatable),
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def pod(namespace: str, name: str, count: int, *, on: str = "", phase: str = "Running", **spec: Any) -> Object:
    condition = {"type": "PodScheduled", "status": "True" if on else "False", "message": "" if on else "no card"}
    container = {"name": "main", "resources": {"requests": {I915: str(count)}}}
    return {
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-02T03:04:05Z"},
        "spec": {"containers": [container], **({"nodeName": on} if on else {}), **spec},
        "status": {"phase": phase, "conditions": [condition]},
    }


@pytest.fixture
def cluster_objects(api: KubeApi, tmp_path: Path) -> KubeApi:
    """Three nodes, of which one is cordoned and one has an unhealthy card; pods that run, have ended, wait, and end."""
    for each in (node("one", 4, 3), node("two", 4, 4), node("three", 2, 2, cordoned=True), node("none", 0, 0)):
        api.put("nodes", each)
    pods = [
        pod("red", "a", 2, on="one"),
        pod("red", "b", 1, on="two"),
        pod("blue", "c", 2, on="two"),
        pod("red", "ended", 3, on="two", phase="Succeeded"),
        pod("red", "large", 5, phase="Pending"),
        pod("blue", "gated", 1, phase="Pending", schedulingGates=[{"name": "budget"}]),
    ]
    leaving = pod("red", "leaving", 1, phase="Pending")
    leaving["metadata"] |= {"deletionTimestamp": "2026-01-02T03:04:06Z", "finalizers": ["example.com/wait"]}
    for each in (*pods, leaving):
        api.put("pods", each)
    quota = {f"requests.{I915}": "6", "pods": "10"}
    used = {f"requests.{I915}": "3", "pods": "4"}
    api.put(
        "resourcequotas",
        {"metadata": {"name": "q", "namespace": "red"}, "status": {"hard": quota, "used": used}},
    )
    contexts = [{"name": name, "context": {"cluster": "here", "namespace": name}} for name in ("red", "blue")]
    config = {
        "current-context": "red",
        "contexts": contexts,
        "clusters": [{"name": "here", "cluster": {"server": api.url}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    return api


@pytest.fixture
def kubeconfig(cluster_objects: KubeApi, tmp_path: Path) -> str:
    return str(tmp_path / "kubeconfig")


async def call(kubeconfig: str, *arguments: str, program: str = "kubectl-accelplane") -> Any:
    """The result of the command; this process serves the API meanwhile."""
    return await asyncio.to_thread(run_command, program, *arguments, env={"KUBECONFIG": kubeconfig})


async def report(kubeconfig: str, *arguments: str) -> Any:
    answer = await call(kubeconfig, "inspect", "-o", "json", *arguments)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


async def test_nodes_show_free_devices_and_namespaces_their_allocations(kubeconfig: str) -> None:
    found = await report(kubeconfig, "-A", "--resource", I915)
    numbers = {item["node"]: (item["allocatable"], item["allocated"], item["free"]) for item in found["nodes"]}
    assert numbers == {"none": (0, 0, 0), "one": (3, 2, 1), "two": (4, 3, 1), "three": (2, 0, 2)}
    assert {item["node"]: item["unhealthy"] for item in found["nodes"]}["one"] == 1
    allocations = {item["namespace"]: (item["pods"], item["allocated"], item["nodes"]) for item in found["namespaces"]}
    assert allocations == {"red": (2, 3, ["one", "two"]), "blue": (1, 2, ["two"])}


async def test_pods_with_enclave_memory_and_no_enclave_are_reported(cluster_objects: KubeApi, kubeconfig: str) -> None:
    assert (await report(kubeconfig, "-A"))["podsWithoutEnclave"] == []
    sgx = node("sgx", 0, 0)
    for amounts in (sgx["status"]["capacity"], sgx["status"]["allocatable"]):
        amounts |= {"sgx.intel.com/epc": "64Mi", "sgx.intel.com/enclave": "10"}
    cluster_objects.put("nodes", sgx)
    for name, resources in (("changed", ("epc", "enclave")), ("unchanged", ("epc",))):
        made = pod("blue", name, 0, on="sgx")
        made["spec"]["containers"][0]["resources"] = {"requests": {f"sgx.intel.com/{each}": "1" for each in resources}}
        cluster_objects.put("pods", made)
    (found,) = (await report(kubeconfig, "-A"))["podsWithoutEnclave"]
    assert (found["namespace"], found["pod"], found["node"]) == ("blue", "unchanged", "sgx")
    assert "the SGX webhook did not change it" in (await call(kubeconfig, "inspect", "-n", "blue")).stdout
    assert "SGX webhook" not in (await call(kubeconfig, "inspect", "-n", "red")).stdout


async def test_the_namespace_is_that_of_the_context_by_default(kubeconfig: str) -> None:
    for arguments, expected in (((), "red"), (("--context", "blue"), "blue"), (("-n", "blue"), "blue")):
        found = await report(kubeconfig, *arguments)
        assert [item["namespace"] for item in found["namespaces"]] == [expected]
        assert found["nodes"][-1]["allocated"] == 3, "of all namespaces"


async def test_a_pending_pod_shows_the_available_devices(kubeconfig: str) -> None:
    (found,) = (await report(kubeconfig, "--waiting"))["waiting"]
    assert found == {
        "namespace": "red", "pod": "large", "resource": I915, "requested": 5, "free": 2, "most_free_on_one_node": 1,
        "most_free_node": "one", "unhealthy": 1, "cordoned": 2, "not_ready": 0, "quota_left": 3,
        "since": "2026-01-02T03:04:05Z", "message": "no card", "scheduling_gates": [],
    }  # fmt: skip
    table = (await call(kubeconfig, "inspect", "--waiting", "-A", "--no-headers")).stdout
    assert [line.split()[1] for line in table.splitlines()] == ["gated", "large"]


async def test_node_and_resource_choose_rows_also_of_other_vendors(kubeconfig: str) -> None:
    found = await report(kubeconfig, "--node", "two", "--resource", "example.com/")
    assert [(item["node"], item["resource"]) for item in found["nodes"]] == [("two", EXAMPLE)]
    assert all(item["resource"] == I915 for item in (await report(kubeconfig))["nodes"])


async def test_csv_and_names_have_the_nodes(kubeconfig: str) -> None:
    answer = await call(kubeconfig, "top", "--cluster", "--once", "-o", "csv", "--sort-by", "FREE")
    rows = list(csv.DictReader(io.StringIO(answer.stdout)))
    assert [row["NODE"] for row in rows] == ["none", "one", "two", "three"]
    assert rows[-1]["STATE"] == "Ready,Cordoned"
    names = await call(kubeconfig, "inspect", "--cluster", "-o", "name", "-n", "blue", program="accelplane")
    assert names.stdout.splitlines()[-1] == f"blue/{I915}"


@pytest.mark.parametrize("pattern", ["GET /api/v1/nodes", r"GET /api/v1/pods\b"])
async def test_a_forbidden_list_is_reported_and_other_data_is_shown(
    cluster_objects: KubeApi, kubeconfig: str, pattern: str
) -> None:
    cluster_objects.fault(pattern, 403)
    answer = await call(kubeconfig, "inspect")
    assert answer.returncode == 1
    assert f"cannot list {pattern.split()[1].removesuffix(chr(92) + 'b')}: " in answer.stderr
    assert [line.split()[:4] for line in answer.stdout.splitlines() if line.startswith("red")] == [
        ["red", I915, "2", "3"]
    ]


async def test_no_device_is_shown_as_free_without_all_pods(cluster_objects: KubeApi, kubeconfig: str) -> None:
    cluster_objects.fault(r"GET /api/v1/pods\b", 403)
    answer = await call(kubeconfig, "inspect", "-o", "json")
    assert {(item["allocated"], item["free"]) for item in json.loads(answer.stdout)["nodes"]} == {(None, None)}


async def test_forbidden_quotas_are_not_a_problem(cluster_objects: KubeApi, kubeconfig: str) -> None:
    cluster_objects.fault("GET .*resourcequotas", 403)
    (found,) = (await report(kubeconfig, "--waiting"))["waiting"]
    assert found["quota_left"] is None


async def test_a_watch_shows_a_failed_list_below_the_table(cluster_objects: KubeApi, kubeconfig: str) -> None:
    cluster_objects.fault("GET /api/v1/nodes", 403, times=1000)
    command = os.path.join(os.path.dirname(sys.executable), "kubectl-accelplane")
    process = await asyncio.create_subprocess_exec(
        command, "inspect", "--watch", "--interval", "0.2", env=os.environ | {"KUBECONFIG": kubeconfig},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(6)]
    process.terminate()
    await process.wait()
    assert "No node has devices.\n" not in lines
    assert any(line.startswith("cannot list /api/v1/nodes: ") for line in lines)


async def test_an_object_of_another_type_is_a_problem(cluster_objects: KubeApi, kubeconfig: str) -> None:
    cluster_objects.put("nodes", {"metadata": {"name": "odd"}, "status": {"capacity": "much"}})
    answer = await call(kubeconfig, "inspect")
    assert answer.returncode == 1
    assert "cannot list /api/v1/nodes: found an object of another type" in answer.stderr


async def test_watch_lists_again(kubeconfig: str) -> None:
    command = os.path.join(os.path.dirname(sys.executable), "kubectl-accelplane")
    process = await asyncio.create_subprocess_exec(
        command, "inspect", "--watch", "--interval", "0.2", "--no-headers", "-n", "blue", "-o", "csv",
        env=os.environ | {"KUBECONFIG": kubeconfig}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(12)]
    process.terminate()
    await process.wait()
    assert lines[:4] == lines[4:8] == lines[8:]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("--kubeconfig", "/nowhere"), 1, "/nowhere"),
        (("--context", "green"), 1, "found no context 'green', expected one of: 'red', 'blue'"),
        (("-n", "red", "-A"), 2, "-n and -A: found both"),
        (("-n", "a/b"), 2, "-n: found 'a/b'"),
        (("--request-timeout", "soon"), 2, "--request-timeout: found 'soon'"),
        (("--waiting", "--node", "one"), 2, "--node: expected it without --waiting"),
        (("--sort-by", "AGE"), 2, "--sort-by: found 'AGE'"),
        (("--plugins", "gpu"), 2, "No such option '--plugins'"),
        (("--node", "nope"), 1, "kubectl accelplane inspect: --node: found no node 'nope'"),
    ],
)
async def test_a_wrong_command_line_names_the_flag(
    kubeconfig: str, arguments: tuple[str, ...], code: int, problem: str
) -> None:
    answer = await call(kubeconfig, "inspect", *arguments)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert problem in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--waiting", "-n", "green"), "No pod of namespace green waits for devices.\n"),
        (("--waiting", "-A", "--resource", "qat."), "No pod waits for devices of qat..\n"),
        (
            ("--node", "bare", "-n", "red"),
            "Node bare has no devices.\n\nNo pod of namespace red holds devices on node bare.\n",
        ),
        (("-A", "--resource", "qat"), "No node has devices of qat.\n\nNo pod holds devices of qat.\n"),
    ],
)
async def test_an_empty_table_names_the_selection(
    cluster_objects: KubeApi, kubeconfig: str, arguments: tuple[str, ...], text: str
) -> None:
    cluster_objects.put("nodes", {"metadata": {"name": "bare"}, "spec": {}, "status": {}})
    answer = await call(kubeconfig, "inspect", "--cluster", *arguments)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, text, "")


async def test_a_server_that_cannot_be_reached_is_one_line(kubeconfig: str, tmp_path: Path) -> None:
    content = json.loads(Path(kubeconfig).read_text())
    content["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "down").write_text(json.dumps(content))
    answer = await call(str(tmp_path / "down"), "inspect")
    assert (answer.returncode, answer.stdout) == (1, "")
    paths = "/api/v1/nodes, /api/v1/pods, /api/v1/namespaces/red/pods, /apis/resource.k8s.io"
    assert answer.stderr == f"kubectl accelplane inspect: cannot list {paths}: 127.0.0.1:1: Connection refused\n"


async def test_a_request_ends_after_its_timeout(cluster_objects: KubeApi, kubeconfig: str) -> None:
    cluster_objects.fault("GET /api/v1/nodes", hang=True)
    answer = await call(kubeconfig, "inspect", "--request-timeout", "1s")
    assert answer.returncode == 1
    assert "no complete response within 1 s" in answer.stderr
