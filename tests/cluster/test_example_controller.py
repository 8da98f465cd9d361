"""The example controller in `examples/node-maintenance` on a real API server, with its own rights and three nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .objects import Object

pytestmark = pytest.mark.cluster

EXAMPLE = REPOSITORY / "examples" / "node-maintenance"
PLAN = "/apis/maintenance.example.com/v1/namespaces/default/nodemaintenances/firmware"
USER = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "node-maintenance"}
REPLICAS = 4
# The node that has one pod, which may not be evicted at first.
GUARDED = "kwok-1"
LABELS = {"example.com/firmware": "outdated"}
# The example's `main` without ports.
PROGRAM = f"""
import asyncio, logging, sys
sys.path.insert(0, {str(EXAMPLE)!r})
import node_maintenance as example
logging.basicConfig(level=logging.INFO)
example.EVICTION_RETRY = 1
client = example.Client(example.load_config(), field_manager="node-maintenance")
times = {{"lease_duration": 4, "renew_deadline": 3, "retry_period": 0.5}}
election = example.Election(name="maintenance", namespace="default", identity=sys.argv[1], **times)
manager = example.Manager(client, election=election, metrics_address="0", health_address="0")
example.Reconciler(manager)
asyncio.run(manager.run())
"""


@pytest.fixture
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    with Cluster.running([]) as running:
        running.add_kwok_nodes(3, labels=LABELS)
        yield running


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLE / name).read_text()))


def workload() -> list[Object]:
    """A Deployment of which one pod may be missing at a time, on all nodes but the guarded one."""
    labels = {"app": "app"}
    container = {"name": "app", "image": "example.com/app"}
    others = {"key": "metadata.name", "operator": "NotIn", "values": [GUARDED]}
    terms = {"nodeSelectorTerms": [{"matchFields": [others]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "affinity": affinity}}
    spec = {"replicas": REPLICAS, "selector": {"matchLabels": labels}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata("app"), "spec": spec}
    return [deployment, budget("app", maxUnavailable=1)]


def guard() -> list[Object]:
    """A pod that may not be evicted."""
    spec = {"containers": [{"name": "guard", "image": "example.com/app"}], "nodeName": GUARDED}
    labels = {"labels": {"app": "guard"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata("guard") | labels, "spec": spec}
    return [pod, budget("guard", minAvailable=1)]


def budget(name: str, **limit: int) -> Object:
    spec = {"selector": {"matchLabels": {"app": name}}, **limit}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(name), "spec": spec}


def metadata(name: str) -> Object:
    return {"name": name, "namespace": "default"}


@contextmanager
def controller(cluster: Cluster, directory: Path, identity: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example as a process, with the rights of `rbac.yaml` and no others."""
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(cluster.user(USER["name"]))
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig)}
    with (directory / f"{identity}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, identity], env=environment, stdout=log, stderr=log)
        try:
            yield process
            assert process.poll() is None, (directory / f"{identity}.log").read_text()
        finally:
            process.kill()
            process.wait()


def items(cluster: Cluster, path: str) -> list[Any]:
    found: Any = cluster.get(path)
    return found["items"]


def cordoned(cluster: Cluster) -> list[str]:
    return [one["metadata"]["name"] for one in items(cluster, "/api/v1/nodes") if one["spec"].get("unschedulable")]


def status(cluster: Cluster) -> dict[str, Any]:
    return (cluster.get(PLAN) or {}).get("status", {})


def is_complete(cluster: Cluster) -> bool:
    return any(one["status"] == "True" for one in status(cluster).get("conditions", []))


def available(cluster: Cluster) -> int:
    found: Any = cluster.get("/apis/apps/v1/namespaces/default/deployments/app")
    return found["status"].get("availableReplicas", 0)


def test_nodes_are_drained_one_at_a_time_within_the_disruption_budget(cluster: Cluster, tmp_path: Path) -> None:
    roles = [{**one, "subjects": [USER]} if "subjects" in one else one for one in documents("rbac.yaml")]
    cluster.apply(*documents("crd.yaml"), *roles, *workload(), *guard())
    cluster.kubectl("wait", "--for=condition=Established", "crd/nodemaintenances.maintenance.example.com")
    wait_until(lambda: available(cluster) == REPLICAS, "the workload to be available", 60)
    before = {one["metadata"]["uid"] for one in items(cluster, "/api/v1/namespaces/default/pods")}
    states: set[str] = set()

    def progress(process: subprocess.Popen[bytes], nodes: int) -> bool:
        assert process.poll() is None, [log.read_text() for log in tmp_path.glob("*.log")]
        names = cordoned(cluster)
        states.update(names)
        assert len(names) <= 1
        assert available(cluster) >= REPLICAS - 1
        return status(cluster).get("nodesDone", 0) >= nodes

    cluster.apply(*documents("sample.yaml"))
    # It is killed while it waits for an eviction. The API server ends with a client's request: if it has changed the
    # budget and not yet deleted the pod, it allows no other eviction for two minutes.
    with controller(cluster, tmp_path, "first") as first:
        wait_until(lambda: progress(first, 1) and status(cluster).get("activeNode") == GUARDED, "the guarded node", 120)
    # Its successor continues.
    cluster.request("DELETE", "/apis/policy/v1/namespaces/default/poddisruptionbudgets/guard")
    with controller(cluster, tmp_path, "second") as second:
        wait_until(lambda: progress(second, 3) and is_complete(cluster), "all nodes to be done", 180)
        assert states == {"kwok-0", "kwok-1", "kwok-2"}
        assert cordoned(cluster) == []
        assert not before & {one["metadata"]["uid"] for one in items(cluster, "/api/v1/namespaces/default/pods")}
        events = items(cluster, "/apis/events.k8s.io/v1/namespaces/default/events")
        assert any(one["reason"] == "Draining" for one in events)

        cluster.request("DELETE", "/apis/apps/v1/namespaces/default/daemonsets/firmware")
        wait_until(
            lambda: cluster.get("/apis/apps/v1/namespaces/default/daemonsets/firmware") is not None,
            "the DaemonSet to be restored",
        )
        cluster.request("DELETE", PLAN)
        wait_until(lambda: cluster.get(PLAN) is None, "the NodeMaintenance to be deleted", 30)
        marks = [name for one in items(cluster, "/api/v1/nodes") for name in one["metadata"].get("annotations", {})]
        assert not [name for name in marks if "maintenance.example.com" in name]
        for path in ("/apis/apps/v1/namespaces/default/daemonsets", "/api/v1/namespaces/default/configmaps"):
            wait_until(
                lambda path=path: not [one for one in items(cluster, path) if one["metadata"]["name"] == "firmware"],
                "owned objects to be collected",
                60,
            )
    for log in tmp_path.glob("*.log"):
        assert "forbidden" not in log.read_text()
        assert "Traceback" not in log.read_text()
