"""The example controller in `examples/node-maintenance` against the double of the API server."""

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lightkube.models.meta_v1 import OwnerReference
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.objects import Metadata
from accelplane.kube.testing import FakeApiServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "node-maintenance"
Object = dict[str, Any]
UID = "0a0a0a0a-0000-0000-0000-000000000000"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("node_maintenance", EXAMPLE / "node_maintenance.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example: Any = load()
PLAN = example.NodeMaintenance(
    Metadata(name="firmware", namespace="default", uid=UID, generation=2), example.MaintenanceSpec({}, "image", "true")
)


def node(name: str, *, active: str = "", done_count: int = 0, unschedulable: bool = False) -> Any:
    labels = {example.ACTIVE: active} if active else {}
    annotations = {f"{example.DONE}{UID}": str(done_count)} if done_count else {}
    return example.Node(
        Metadata(name=name, labels=labels, annotations=annotations), example.NodeSpec(unschedulable=unschedulable)
    )


def pod(name: str, place: str, *, owner: str = "ReplicaSet", phase: str = "Running", generation: int = 0) -> Any:
    """A pod on a node. With a generation, it is the ready one of the maintenance."""
    owners = [OwnerReference(apiVersion="apps/v1", kind=owner, name="o", uid="1", controller=True)]
    metadata = Metadata(name=name, namespace="default", ownerReferences=owners)
    if generation:
        metadata.labels, metadata.annotations = {example.MANAGED: UID}, {example.REVISION: str(generation)}
    status = example.PodStatus(phase, [{"type": "Ready", "status": "True"}])
    return example.Pod(metadata, example.PodPlace(place), status)


@pytest.mark.parametrize(
    ("nodes", "pods", "action", "name"),
    [
        ([], [], "none", None),
        ([node("a"), node("b")], [], "cordon", "a"),
        ([node("a", done_count=2), node("b", done_count=1)], [], "cordon", "b"),
        ([node("a", done_count=2)], [], "none", None),
        ([node("a", unschedulable=True), node("b")], [], "cordon", "b"),
        ([node("a", active="another")], [], "none", None),
        ([node("a"), node("b", active=UID)], [pod("p", "b"), pod("q", "a")], "evict", "b"),
        ([node("b", active=UID)], [pod("p", "b", owner="DaemonSet")], "wait", "b"),
        ([node("b", active=UID)], [pod("p", "b", phase="Succeeded")], "wait", "b"),
        ([node("b", active=UID)], [pod("p", "b", owner="DaemonSet", generation=1)], "wait", "b"),
        ([node("b", active=UID)], [pod("p", "a", owner="DaemonSet", generation=2)], "wait", "b"),
        ([node("b", active=UID)], [pod("p", "b", owner="DaemonSet", generation=2)], "uncordon", "b"),
    ],
)
def test_next_step_follows_from_nodes_and_pods(
    nodes: list[Any], pods: list[Any], action: str, name: str | None
) -> None:
    step = example.next_step(PLAN, nodes, pods)
    assert (step.action, step.node and step.node.metadata.name) == (action, name)


@contextlib.asynccontextmanager
async def controller(server: FakeApiServer) -> AsyncIterator[None]:
    client = Client(server.config, field_manager="node-maintenance")
    manager = Manager(client, health_address=OFF, metrics_address=OFF)
    example.Reconciler(manager)
    task = asyncio.create_task(manager.run())
    try:
        yield
        assert not task.done()
    finally:
        manager.stop()
        async with asyncio.timeout(30):
            await task
        await client.close()


@contextlib.asynccontextmanager
async def setup() -> AsyncIterator[FakeApiServer]:
    """Two nodes with the sample's label, one without, and a pod on each."""
    async with FakeApiServer() as server:
        for name in ("a", "b", "c"):
            labels = {"example.com/firmware": "outdated"} if name != "c" else {}
            server.put("nodes", {"metadata": {"name": name, "labels": labels}, "spec": {}})
            server.put("pods", running(f"app-{name}", name))
        yield server


def running(name: str, place: str, **metadata: Any) -> Object:
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {"nodeName": place},
        "status": ready,
    }


def run_script(server: FakeApiServer) -> bool:
    """Does what the DaemonSet controller and the kubelet do. Returns whether a node is active."""
    sets = server.all("daemonsets")
    template = sets[0]["spec"]["template"] if sets else {}
    selector = template.get("spec", {}).get("nodeSelector", {})
    chosen = [one for one in server.all("nodes") if selector and selector.items() <= one["metadata"]["labels"].items()]
    names = {f"maintenance-{one['metadata']['name']}" for one in chosen}
    for one in server.all("pods"):
        if one["metadata"]["name"].startswith("maintenance-") and one["metadata"]["name"] not in names:
            server.remove("pods", one["metadata"]["name"], "default")
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "firmware", "uid": "2", "controller": True}
    for one in chosen:
        name = one["metadata"]["name"]
        if server.get("pods", f"maintenance-{name}", "default") is None:
            server.put("pods", running(f"maintenance-{name}", name, ownerReferences=[owner], **template["metadata"]))
    return bool(chosen)


def cordoned(server: FakeApiServer) -> list[str]:
    return [one["metadata"]["name"] for one in server.all("nodes") if one["spec"].get("unschedulable")]


def plan(server: FakeApiServer) -> Object:
    return server.get("nodemaintenances", "firmware", "default") or {}


def complete(server: FakeApiServer) -> Object:
    return next(iter(plan(server).get("status", {}).get("conditions", [])), {})


def create(server: FakeApiServer) -> None:
    document = yaml.safe_load((EXAMPLE / "sample.yaml").read_text())
    document["metadata"]["generation"] = 1
    server.put("nodemaintenances", document)


async def test_nodes_are_drained_one_at_a_time_and_get_their_script() -> None:
    async with setup() as server, controller(server):
        create(server)
        await until(lambda: cordoned(server) == ["a"] and server.get("pods", "app-a", "default") is None, 30)
        assert server.get("pods", "app-b", "default")
        await until(lambda: plan(server).get("status", {}).get("activeNode") == "a", 30)
        assert complete(server)["status"] == "False"
        states: list[list[str]] = []
        async with asyncio.timeout(30):
            while complete(server).get("status") != "True":
                states.append(cordoned(server))
                run_script(server)
                await asyncio.sleep(0.01)
        assert all(len(names) <= 1 for names in states)
        assert ["b"] in states
        assert cordoned(server) == []
        assert plan(server)["status"] == {
            "observedGeneration": 1,
            "nodes": 2,
            "nodesDone": 2,
            "conditions": [complete(server)],
        }
        assert [one["metadata"]["name"] for one in server.all("pods") if one["metadata"]["name"].startswith("app")] == [
            "app-c"
        ]


async def test_eviction_that_a_disruption_budget_forbids_is_retried() -> None:
    example.EVICTION_RETRY, before = 0.05, example.EVICTION_RETRY
    try:
        async with setup() as server, controller(server):
            server.fault("POST .*/eviction", 429, times=3)
            create(server)
            await until(lambda: server.get("pods", "app-a", "default") is None, 30)
            assert server.count("POST .*/pods/app-a/eviction") == 4
    finally:
        example.EVICTION_RETRY = before


async def test_owned_objects_are_restored_and_foreign_ones_stay() -> None:
    async with setup() as server, controller(server):
        foreign = server.put(
            "configmaps", {"metadata": {"name": "firmware", "namespace": "default"}, "data": {"a": "1"}}
        )
        create(server)
        await until(lambda: complete(server).get("reason") == "NameConflict", 30)
        assert server.get("configmaps", "firmware", "default") == foreign
        assert cordoned(server) == []
        server.remove("configmaps", "firmware", "default")
        # The next pass is after a minute, or when something changes.
        server.put("nodes", {"metadata": {"name": "d", "labels": {"example.com/firmware": "outdated"}}, "spec": {}})
        await until(lambda: cordoned(server) == ["a"], 30)
        server.remove("daemonsets", "firmware", "default")
        await until(lambda: bool(server.get("daemonsets", "firmware", "default")), 30)


async def test_deletion_makes_the_nodes_schedulable_again() -> None:
    async with setup() as server, controller(server):
        create(server)
        await until(lambda: cordoned(server) == ["a"], 30)
        other = Client(server.config, field_manager="kubectl")
        await other.delete(example.NodeMaintenance, "firmware", "default")
        await other.close()
        await until(lambda: not plan(server), 30)
        assert cordoned(server) == []
        assert not any(example.ACTIVE in one["metadata"]["labels"] for one in server.all("nodes"))


async def test_heartbeats_of_nodes_cause_no_requests() -> None:
    async with setup() as server, controller(server):
        create(server)
        await until(lambda: plan(server).get("status", {}).get("activeNode") == "a", 30)
        await asyncio.sleep(0.2)
        before = len(server.requests)
        for number in range(20):
            found = server.objects["nodes", "", "b"]
            server.put("nodes", {**found, "status": {"conditions": [{"type": "Ready", "reason": str(number)}]}})
            await asyncio.sleep(0.01)
        assert len(server.requests) == before


def test_example_has_at_most_250_lines_of_code() -> None:
    lines = (EXAMPLE / "node_maintenance.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 250
