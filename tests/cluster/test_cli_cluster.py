"""`kubectl accelplane` with the real kubectl and API server: the devices of a cluster, and what a user may see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .machine import wait_until
from .node import Node
from .objects import Object, pod

pytestmark = pytest.mark.cluster

I915 = "gpu.intel.com/i915"
NODES = ("cards-0", "cards-1")


@pytest.fixture(scope="module")
def cards(cluster: Cluster) -> Iterator[None]:
    """Two kwok nodes with two GPUs each."""
    cluster.add_kwok_nodes(2, prefix="cards", resources={I915: "2"})
    yield
    cluster.kubectl("delete", "node", *NODES)


def run(cluster: Cluster, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """kubectl with the plugin on PATH."""
    kubectl = cluster.assets.program("kubectl")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{Path(kubectl).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(kubeconfig or cluster.kubeconfig),
    }
    return subprocess.run(
        [kubectl, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def list_rows(cluster: Cluster, *arguments: str) -> Any:
    answer = run(cluster, "accelplane", "inspect", "--cluster", "-o", "json", *arguments)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def place(cluster: Cluster, namespace: str, name: str, count: int, node: str = "") -> None:
    path = pod(name, namespace=namespace, resources={I915: str(count)})
    if node:
        path["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    cluster.apply(path)


def wait_scheduled(cluster: Cluster, namespace: str, name: str, status: str) -> bool:
    found = cluster.pod(name, namespace) or {}
    conditions = found.get("status", {}).get("conditions", ())
    return any(each["type"] == "PodScheduled" and each["status"] == status for each in conditions)


def test_kubectl_finds_the_plugin_and_completes_its_flags(cluster: Cluster) -> None:
    assert "kubectl-accelplane" in run(cluster, "plugin", "list").stdout
    answer = run(cluster, "__complete", "accelplane", "inspect", "--wai")
    assert answer.stdout.splitlines()[0].startswith("--waiting\t")
    assert answer.stdout.splitlines()[-1] == ":4"


def test_sums_are_those_of_pods_and_a_pending_pod_has_its_reason(cluster: Cluster, cards: None, namespace: str) -> None:
    for node in NODES:
        place(cluster, namespace, f"on-{node}", 1, node)
    for node in NODES:
        wait_until(lambda node=node: wait_scheduled(cluster, namespace, f"on-{node}", "True"), f"pod on {node}")
    place(cluster, namespace, "large", 2)
    wait_until(lambda: wait_scheduled(cluster, namespace, "large", "False"), "large: cannot be scheduled")

    report = list_rows(cluster, "-A")
    assert (report["apiVersion"], report["kind"]) == ("accelplane/v1", "ClusterDeviceList")
    nodes = {item["node"]: item for item in report["nodes"]}
    assert [(nodes[name]["allocatable"], nodes[name]["allocated"], nodes[name]["free"]) for name in NODES] == [
        (2, 1, 1),
        (2, 1, 1),
    ]
    (used,) = [item for item in report["namespaces"] if item["namespace"] == namespace]
    assert (used["pods"], used["allocated"], used["nodes"]) == (2, 2, list(NODES))

    (waiting,) = list_rows(cluster, "--waiting", "-n", namespace)["waiting"]
    assert (waiting["requested"], waiting["free"], waiting["most_free_on_one_node"]) == (2, 2, 1)
    assert f"Insufficient {I915}" in waiting["message"]
    wide = run(cluster, "accelplane", "inspect", "--cluster", "-A", "-o", "wide")
    assert f"{namespace}/on-cards-0" in wide.stdout
    once = run(cluster, "accelplane", "top", "--cluster", "--once", "--node", "cards-1", "--no-headers")
    assert [line.split()[0] for line in once.stdout.splitlines() if line.startswith("cards")] == ["cards-1"]


def test_a_user_with_rights_on_one_namespace_sees_it_and_reads_what_is_missing(
    cluster: Cluster, cards: None, namespace: str, tmp_path: Path
) -> None:
    user = "reader"
    cluster.apply(*reader(user, namespace))
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(cluster.user(user))
    place(cluster, namespace, "mine", 1, NODES[0])
    wait_until(lambda: wait_scheduled(cluster, namespace, "mine", "True"), "mine: scheduled")
    # RBAC is evaluated by a cache that follows the new objects.
    command = ("accelplane", "inspect", "--cluster", "-n", namespace)
    wait_until(lambda: namespace in run(cluster, *command, kubeconfig=kubeconfig).stdout, "rights of the user")
    answer = run(cluster, *command, kubeconfig=kubeconfig)
    assert answer.returncode == 1
    assert "cannot list /api/v1/nodes" in answer.stderr
    assert "cannot list /api/v1/pods" in answer.stderr
    assert "cannot list /apis/resource.k8s.io/v1/resourceslices" in answer.stderr
    assert namespace not in answer.stderr
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith(namespace)]
    assert line.split() == [namespace, I915, "1", "1"]


def test_the_directory_of_a_pod_has_the_time_of_its_allocation(cluster: Cluster, node: Node, namespace: str) -> None:
    cluster.apply(pod("worker", namespace=namespace, node=node.name))
    found = cluster.wait_pod("worker", namespace=namespace)
    path = node.path(f"/var/lib/kubelet/pods/{found['metadata']['uid']}/plugins").stat().st_mtime
    (container,) = found["status"]["containerStatuses"]
    created, started = (
        datetime.fromisoformat(text).timestamp()
        for text in (found["metadata"]["creationTimestamp"], container["state"]["running"]["startedAt"])
    )
    assert created <= path < started + 1  # times of the API are whole seconds


def reader(user: str, namespace: str) -> list[Object]:
    """The right to list pods and claims of one namespace."""
    group = "rbac.authorization.k8s.io"
    metadata = {"name": user, "namespace": namespace}
    rule = {"apiGroups": ["", "resource.k8s.io"], "resources": ["pods", "resourceclaims"], "verbs": ["get", "list"]}
    return [
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        },
    ]
