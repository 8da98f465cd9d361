"""The real scheduler and claims: tiles, shares, requests of resources, and units of both APIs on one node.

Gates that are on by default from 1.36 on are enabled in older versions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import device_holders
from .build import ClusterError, kubernetes_minor
from .cluster import Cluster
from .conftest import running_cluster
from .dra_nodes import API, EXTENDED, GPU, NAMES, DraNode, install_classes
from .gpu_nodes import I915, KUBELET, NAMESPACE
from .machine import Daemon, wait_until
from .node import NodePlan
from .objects import Object

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(kubernetes_minor() < 34, reason="dynamic resource allocation is off before 1.34"),
]

FIRST, SECOND = NAMES
GATES = ("DRAPartitionableDevices", "DRAConsumableCapacity", "DRAExtendedResource") if kubernetes_minor() < 36 else ()
TILE = "gpu-tile.intel.com"
ADDRESSES = tuple(f"0000:{number:02x}:00.0" for number in range(1, 5))
# 500 take some ten minutes.
PODS = int(os.environ.get("ACCELPLANE_SPLIT_PODS", "40"))
KEY = I915.replace("/", "~1")
PATHS = ("/status/capacity", "/status/allocatable")
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"


@pytest.fixture(scope="module")
def running(cluster_is_possible: None) -> Iterator[Cluster]:
    plan = NodePlan(kubelet={**KUBELET, "featureGates": dict.fromkeys(GATES[2:], True)})
    with running_cluster(plan, gates=GATES) as cluster:
        install_classes(cluster)
        yield cluster


@pytest.fixture
def gpu(running: Cluster, tmp_path: Path) -> Iterator[DraNode]:
    """A node with a GPU, without an agent."""
    node = DraNode(running.nodes["node-1"], tmp_path / "tree", cards=1)
    yield node
    node.reset()


def observe(node: DraNode) -> tuple[Daemon, Path]:
    """Starts a program that reports the containers with nodes of GPUs. Returns it and its log."""
    log = Path("/var/lib/kubelet/holders.log")
    daemon = node.start("holders", sys.executable, device_holders.__file__, log, "/dev/dri")
    return daemon, node.node.path(log)


def printed(node: DraNode, pod: str, script: str) -> str:
    return node.cluster.kubectl("exec", pod, "--", "sh", "-c", script).strip()


def test_a_gpu_is_not_allocated_beside_its_tiles(gpu: DraNode) -> None:
    """Cases 31 and 32."""
    gpu.unplug("card0")
    gpu.plug("card0", tiles=2)
    gpu.start_agent()
    tiles = [f"{FIRST}-t0", f"{FIRST}-t1"]
    gpu.wait_devices([FIRST, *tiles])
    counter_sets = [each["spec"] for each in gpu.slices() if each["spec"].get("sharedCounters")]
    assert [bool(each.get("devices")) for each in counter_sets] == [kubernetes_minor() < 35]
    gpu.run_claiming("whole")
    gpu.claim("tile-0", device_class=TILE)
    gpu.start_claiming("tile-0", "tile-0")
    gpu.wait_unschedulable("tile-0")
    gpu.delete("whole")
    gpu.cluster.wait_pod("tile-0", namespace=NAMESPACE)
    gpu.claim("tile-1", device_class=TILE)
    gpu.run_claiming("tile-1", "tile-1")
    assert sorted(gpu.allocated("tile-0") + gpu.allocated("tile-1")) == tiles
    masks = [printed(gpu, each, "echo $ZE_AFFINITY_MASK") for each in ("tile-0", "tile-1")]
    assert sorted(masks) == ["0.0", "0.1"]
    gpu.delete("tile-0")
    gpu.start_claiming("again", "whole")
    gpu.wait_unschedulable("again")
    gpu.delete("tile-1")
    gpu.cluster.wait_pod("again", namespace=NAMESPACE)


def test_a_shared_gpu_has_one_claim_for_each_share(gpu: DraNode) -> None:
    """Case 33. Case 34 is in `test_dra_agent`."""
    _, log = observe(gpu)
    gpu.start_agent("-dra-api=dra", "-shared-dev-num=3")
    gpu.wait_devices([FIRST])
    names = ["a", "b", "c"]
    for name in names:
        gpu.run_claiming(name)
        assert gpu.seen_by(name) == {"card0", "renderD128"}
    results = [
        (gpu.cluster.get(f"{API}/namespaces/{NAMESPACE}/resourceclaims/{name}") or {})["status"]["allocation"][
            "devices"
        ]["results"][0]
        for name in names
    ]
    assert {each["device"] for each in results} == {FIRST}
    assert len({each["shareID"] for each in results}) == 3
    gpu.start_claiming("d")
    gpu.wait_unschedulable("d")
    gpu.delete("a")
    gpu.cluster.wait_pod("d", namespace=NAMESPACE)
    wait_until(lambda: "shared card0\n" in log.read_text(), "the containers that share the GPU are reported", 30)


def request(node: DraNode, name: str) -> None:
    """Creates a pod that requests the resource of the device plugin, for any node."""
    described = node.pod(name, {I915: 1})
    del described["spec"]["nodeName"]
    node.cluster.apply(described)


def patch_status(node: DraNode, *operations: Object) -> None:
    patch = json.dumps(operations)
    arguments = ("--subresource=status", "--type=json", f"--patch={patch}")
    node.cluster.kubectl("patch", "node", node.node.name, *arguments)


def test_a_pod_that_requests_the_old_resource_runs_after_the_end_of_the_device_plugin(gpu: DraNode) -> None:
    """Cases 47 and 48."""
    gpu.cluster.kubectl("apply", "--kustomize", EXTENDED)
    gpu.start_agent("-dra-api=plugin")
    gpu.wait_counts(1, 1)
    request(gpu, "before")
    assert "extendedResourceClaimStatus" not in gpu.cluster.wait_pod("before", namespace=NAMESPACE)["status"]
    gpu.delete("before")
    gpu.stop_agent()
    # What the kubelet leaves after five minutes without a device plugin, until its Node is created anew.
    gpu.node.kubelet.stop()
    gpu.node.path(CHECKPOINT).unlink()
    patch_status(gpu, *({"op": "replace", "path": f"{path}/{KEY}", "value": "0"} for path in PATHS))
    gpu.node.kubelet.start()
    agent = gpu.start_agent("-dra-api=dra")
    gpu.wait_devices([FIRST])
    assert gpu.node.allocatable(I915) == 0
    request(gpu, "pod")
    if kubernetes_minor() < 35:
        gpu.wait_unschedulable("pod")
        wait_until(lambda: f"the Node still has {I915} of an earlier device plugin" in agent.tail(200), "problem", 30)
        patch_status(gpu, {"op": "remove", "path": f"/status/capacity/{KEY}"})
    found = gpu.cluster.wait_pod("pod", namespace=NAMESPACE)
    assert found["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    assert gpu.seen_by("pod") == {"card0", "renderD128"}
    gpu.delete("pod")
    gpu.wait_nothing_left()
    gpu.cluster.kubectl("delete", "--kustomize", EXTENDED)


class PodStream:
    """Pods that take a GPU for a moment, in turn by a claim and by the device plugin, on a node that has both."""

    WINDOW = 8

    def __init__(self, node: DraNode) -> None:
        self.node = node
        self.created = 0
        self.results: Counter[tuple[str, str]] = Counter()  # by kind, and phase or reason
        request = {"name": "gpu", "exactly": {"deviceClassName": GPU}}
        node.cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": "gpu", "namespace": NAMESPACE},
                "spec": {"spec": {"devices": {"requests": [request]}}},
            }
        )

    def run(self, count: int) -> None:
        """Creates pods, at most eight at a time, and waits until all have ended."""
        last = self.created + count

        def step() -> bool:
            present = self._collect()
            for _ in range(min(self.WINDOW - present, last - self.created)):
                self.create("0.3")
            return self.created == last and not present

        try:
            wait_until(step, "", 60 + 3 * count, every=0.2)
        except ClusterError:
            raise ClusterError(f"{self.created} of {last} pods created, ended: {dict(self.results)}") from None

    def create(self, seconds: str) -> str:
        """Creates the next pod, which runs for so long. Returns its name."""
        kind = ("plugin", "claim")[self.created % 2]
        name = f"stream-{self.created}"
        described = self.node.pod(name, {I915: 1} if kind == "plugin" else {}, labels={"stream": kind})
        spec = described["spec"]
        del spec["nodeName"]
        spec["containers"][0]["command"] = ["sleep", seconds]
        if kind == "claim":
            spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
            spec["containers"][0]["resources"]["claims"] = [{"name": "gpu"}]
        status, answer = self.node.cluster.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", described)
        assert status == 201, answer
        self.created += 1
        return name

    def _collect(self) -> int:
        """Deletes the pods that have ended. Returns the number of the others."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        pods: list[Object] = (self.node.cluster.get(f"{path}?labelSelector=stream") or {"items": []})["items"]
        for pod in pods:
            ended = pod["status"].get("phase") in ("Succeeded", "Failed")
            if ended and "deletionTimestamp" not in pod["metadata"]:
                result = pod["status"].get("reason") or pod["status"]["phase"]
                self.results[pod["metadata"]["labels"]["stream"], result] += 1
                self.node.cluster.request("DELETE", f"{path}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        return len(pods)


@pytest.fixture
def split(running: Cluster, tmp_path: Path) -> Iterator[DraNode]:
    """A node with four GPUs."""
    node = DraNode(running.nodes["node-1"], tmp_path / "tree", cards=len(ADDRESSES))
    yield node
    node.reset()


def start_split_agent(node: DraNode, *addresses: str) -> None:
    """Starts or replaces the agent. These GPUs are for claims, the others for the device plugin."""
    node.stop_agent()
    node.start_agent("-dra-api=" + ",".join(f"{address}=dra" for address in addresses))


def wait_split(node: DraNode, *addresses: str) -> None:
    node.wait_devices([f"{re.sub('[:.]', '-', address)}-0x56c0" for address in addresses], 60)
    node.wait_counts(2, 2)


def test_no_gpu_has_two_containers_while_pods_of_both_apis_come_and_go(split: DraNode) -> None:
    """Case 50. Halfway, the GPUs of both APIs are exchanged while pods have all of them."""
    before, after = ADDRESSES[:2], ADDRESSES[2:]
    holders, log = observe(split)
    start_split_agent(split, *before)
    wait_split(split, *before)
    stream = PodStream(split)
    stream.run(PODS // 2 - len(ADDRESSES))
    for name in [stream.create("8") for _ in ADDRESSES]:
        split.cluster.wait_pod(name, namespace=NAMESPACE)
    start_split_agent(split, *after)
    stream.run(PODS // 2)
    wait_split(split, *after)
    assert holders.running
    lines = log.read_text().splitlines()
    assert [line for line in lines if line.startswith("shared")] == []
    print(f"{PODS} pods ended: {dict(stream.results)}; containers: {dict(Counter(lines))}")
    assert len(set(lines)) == len(ADDRESSES)
    assert stream.results["claim", "Succeeded"] == PODS // 2
