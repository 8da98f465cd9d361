"""`kubectl accelplane` in a cluster whose devices are for claims (DRA), with a double of the API server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kubeapi import KubeApi, Object
from processes import run_command

pytestmark = pytest.mark.memory

GPU = "gpu.intel.com"


def device(name: str, *, parent: str = "", shares: int = 1, taint: str = "") -> Object:
    made: Object = {
        "name": name,
        "attributes": {"parent": {"string": parent}},
        "capacity": {"shares": {"value": str(shares)}},
    }
    if shares > 1:
        made["allowMultipleAllocations"] = True
    if taint:
        made["taints"] = [{"key": f"{GPU}/health", "value": "memory", "effect": taint}]
    return made


def resource_slice(name: str, devices: list[Object], *, driver: str = GPU, generation: int = 1) -> Object:
    pool = {"name": "one", "generation": generation, "resourceSliceCount": 1}
    return {"metadata": {"name": name}, "spec": {"driver": driver, "pool": pool, "nodeName": "one", "devices": devices}}


def claim(name: str, *devices: str, pods: tuple[str, ...] = (), device_class: str = GPU, **result: Any) -> Object:
    request = {"name": "device", "exactly": {"deviceClassName": device_class, "count": 2}}
    results = [{"request": "device", "driver": GPU, "pool": "one", "device": each, **result} for each in devices]
    status: Object = {"allocation": {"devices": {"results": results}}} if devices else {}
    status["reservedFor"] = [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]
    metadata = {"name": name, "namespace": "red"}
    return {"metadata": metadata, "spec": {"devices": {"requests": [request]}}, "status": status}


def pod(name: str, *claims: Object, resources: dict[str, str] | None = None, **status: Any) -> Object:
    container = {"name": "main", "resources": {"requests": resources or {}}}
    return {
        "metadata": {"name": name, "namespace": "red"},
        "spec": {"containers": [container], "resourceClaims": list(claims)},
        "status": {"phase": "Pending", **status},
    }


@pytest.fixture
def cluster(api: KubeApi, tmp_path: Path) -> KubeApi:
    """A node with devices for claims only."""
    served = {"kind": "APIGroup", "versions": [{"version": "v1"}, {"version": "v1beta1"}]}
    api.fault("GET /apis/resource.k8s.io$", 200, times=-1, body=json.dumps(served).encode())
    ready = [{"type": "Ready", "status": "True"}]
    api.put("nodes", {"metadata": {"name": "one"}, "status": {"conditions": ready}})
    for name, selector, extended in (
        (GPU, f'device.driver == "{GPU}"', None),
        ("large-gpus", f"device.driver == '{GPU}' && device.capacity['{GPU}'].memory > 1", None),
        (f"i915.{GPU}", f'device.driver == "{GPU}"', f"{GPU}/i915"),
    ):
        spec: Object = {"selectors": [{"cel": {"expression": selector}}]}
        api.put("deviceclasses", {"metadata": {"name": name}, "spec": spec | {"extendedResourceName": extended}})
    here = {"cluster": {"server": api.url}, "name": "here"}
    context = {"name": "red", "context": {"cluster": "here", "namespace": "red"}}
    (tmp_path / "kubeconfig").write_text(
        json.dumps({"current-context": "red", "contexts": [context], "clusters": [here]})
    )
    return api


async def call(tmp_path: Path, *arguments: str) -> Any:
    """The result of the command; this process serves the API meanwhile."""
    environment = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    return await asyncio.to_thread(run_command, "kubectl-accelplane", "inspect", *arguments, env=environment)


async def report(tmp_path: Path, *arguments: str) -> Any:
    answer = await call(tmp_path, "-o", "json", *arguments)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def numbers(found: Any) -> tuple[int, ...]:
    (item,) = found["nodes"]
    assert (item["node"], item["resource"]) == ("one", GPU)
    return item["capacity"], item["allocatable"], item["allocated"], item["free"], item["unhealthy"]


async def test_devices_of_slices_are_counted_and_the_pods_of_claims_hold_them(cluster: KubeApi, tmp_path: Path) -> None:
    cluster.put("resourceslices", resource_slice("old", [device("x"), device("y")], generation=1))
    devices = [device("a"), device("b"), device("c", taint="NoSchedule"), device("d", taint="None")]
    cluster.put("resourceslices", resource_slice("new", devices, generation=2))
    cluster.put("resourceslices", resource_slice("foreign", [device("z")], driver="gpu.example.com"))
    cluster.put("resourceclaims", claim("shared", "a", "b", pods=("first", "second")))
    cluster.put("resourceclaims", claim("monitor", "a", "b", "c", "d", pods=("monitor",), adminAccess=True))
    found = await report(tmp_path)
    assert numbers(found) == (4, 3, 2, 1, 1)
    assert found["nodes"][0]["holders"] == ["red/first (2)", "red/second"]
    (namespace,) = found["namespaces"]
    assert (namespace["pods"], namespace["allocated"], namespace["nodes"]) == (2, 2, ["one"])


async def test_tiles_are_parts_of_their_gpu_and_shares_are_counted(cluster: KubeApi, tmp_path: Path) -> None:
    tiles = [device("a-t0", parent="a"), device("a-t1", parent="a")]
    cluster.put("resourceslices", resource_slice("gpus", [device("a"), *tiles, device("b", shares=3)]))
    cluster.put("resourceclaims", claim("tiles", "a-t0", "a-t1", pods=("one",)))
    cluster.put("resourceclaims", claim("share", "b", pods=("two",), shareID="1b4e28ba-2fa1-11d2-883f-0016d3cca427"))
    assert numbers(await report(tmp_path)) == (4, 4, 2, 2, 0)


@pytest.mark.parametrize("device_class", [GPU, "large-gpus", f"other.{GPU}"])
async def test_a_pod_waits_for_the_driver_of_its_claim(cluster: KubeApi, tmp_path: Path, device_class: str) -> None:
    cluster.put("resourceslices", resource_slice("gpus", [device("a"), device("b")]))
    cluster.put("resourceclaims", claim("held", "a", pods=("holder",)))
    cluster.put("resourceclaims", claim("made-1", device_class=device_class))
    cluster.put("resourceclaims", claim("foreign", device_class="gpu.example.com"))
    made = [{"name": "gpu", "resourceClaimName": "made-1"}]
    condition = {"type": "PodScheduled", "status": "False", "message": "cannot allocate all claims"}
    names = {"name": "gpu", "resourceClaimTemplateName": "t"}, {"name": "other", "resourceClaimName": "foreign"}
    cluster.put("pods", pod("waiting", *names, resourceClaimStatuses=made, conditions=[condition]))
    (found,) = (await report(tmp_path, "--waiting"))["waiting"]
    assert (found["pod"], found["resource"], found["requested"], found["free"]) == ("waiting", GPU, 2, 1)
    assert found["message"] == "cannot allocate all claims"


async def test_a_resource_that_a_class_names_is_that_of_its_driver(cluster: KubeApi, tmp_path: Path) -> None:
    cluster.put("resourceslices", resource_slice("gpus", [device("a"), device("b")]))
    cluster.put("resourceclaims", claim("extended", "a", pods=("running",)))
    running = pod("running", resources={f"{GPU}/i915": "1"}, phase="Running")
    running["spec"]["nodeName"] = "one"
    running["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "extended", "requestMappings": []}
    cluster.put("pods", running)
    cluster.put("pods", pod("waiting", resources={f"{GPU}/i915": "2"}))
    found = await report(tmp_path)
    assert [(item["resource"], item["allocated"]) for item in found["namespaces"]] == [(GPU, 1)]
    (item,) = (await report(tmp_path, "--waiting"))["waiting"]
    assert (item["pod"], item["resource"], item["requested"], item["free"]) == ("waiting", GPU, 2, 1)


async def test_no_device_is_shown_as_free_without_all_claims(cluster: KubeApi, tmp_path: Path) -> None:
    cluster.put("resourceslices", resource_slice("gpus", [device("a"), device("b")]))
    cluster.put("resourceclaims", claim("held", "a", pods=("holder",)))
    cluster.fault(r"GET /apis/resource.k8s.io/v1/resourceclaims\b", 403)
    answer = await call(tmp_path, "-o", "json")
    assert answer.returncode == 1
    found = json.loads(answer.stdout)
    assert [(item["allocated"], item["free"]) for item in found["nodes"]] == [(None, None)]
    assert [(item["namespace"], item["allocated"]) for item in found["namespaces"]] == [("red", 1)]
    assert "cannot list /apis/resource.k8s.io/v1/resourceclaims: " in found["problems"][0]
