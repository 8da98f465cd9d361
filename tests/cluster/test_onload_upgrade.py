"""Ordered upgrades of the Onload operator on three kwok nodes, with both generations of KMM.

Every test with an upgrade records nodes and pods: no module is unloaded under a pod, and one node changes at a time.
"""

from __future__ import annotations

import http
from collections.abc import Iterator
from typing import Any

import pytest

from .kmm_decisions import DESIRED, NAME_LABEL
from .machine import wait_until
from .objects import Object, pod
from .onload_lab import (
    BAD,
    MODULE,
    NAMES,
    NAMESPACE,
    NEW,
    OLD,
    RESOURCE,
    SELECTOR,
    SFC,
    Lab,
    application,
    onload,
    running_lab,
    violations,
)
from .recording import recording

pytestmark = [pytest.mark.cluster, pytest.mark.by_turns]

NODES = ("node-0", "node-1", "node-2")
HOLD = "onload.amd.com/hold"


@pytest.fixture(scope="module", params=[1, 2], ids=["KMM 1.1", "KMM 2"])
def shared(
    cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("onload"), request.param) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """A running operator without resources."""
    with shared.operator():
        yield shared
        shared.kmm.set_knobs()
        shared.clear()
        for node in NODES:
            shared.annotate(node, {HOLD: None})
            shared.label(node, SELECTOR)


def app_on(node: str, **more: str) -> Object:
    """A pod with Onload on this node, which nothing creates again."""
    return pod(f"app-{node}", namespace=NAMESPACE, node=node, resources={RESOURCE: "1"}, labels=more)


def budget(name: str) -> Object:
    """A PodDisruptionBudget that allows no eviction of the application."""
    spec = {"selector": {"matchLabels": {"app": name}}, "minAvailable": 1}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def install(lab: Lab, version: str = OLD, **spec: Any) -> None:
    lab.create(onload(version, **spec))
    lab.wait_complete(version)


def upgraded(lab: Lab, version: str) -> set[str]:
    return {node for node in NODES if not lab.problems(version, only=[node])}


def test_nodes_are_upgraded_one_after_the_other_with_pods_in_use(lab: Lab) -> None:
    install(lab)
    lab.cluster.apply(*application(6, budget=2))
    lab.wait(lambda: lab.available() == 6, "the application")
    before = {each["metadata"]["uid"] for each in lab.app_pods()}
    with recording(lab.cluster) as events:
        lab.upgrade(NEW)
        lab.wait_complete(NEW)
        lab.wait(lambda: lab.available() == 6, "the application after the upgrade")
        assert violations(events()) == []
    assert not before & {each["metadata"]["uid"] for each in lab.app_pods()}
    status = lab.status()["onload"]
    assert status["version"] == NEW
    assert (status["nodesMatching"], status["nodesUpgraded"], status["currentNodes"]) == (3, 3, [])


def test_a_disruption_budget_blocks_the_upgrade_until_it_allows_the_eviction(lab: Lab) -> None:
    install(lab)
    lab.cluster.apply(app_on("node-0"), budget("app-node-0"))
    lab.wait(lambda: len(lab.app_pods()) == 1, "the pod")
    with recording(lab.cluster) as events:
        lab.upgrade(NEW)
        lab.wait(lambda: lab.status()["onload"]["blockingPods"] == [f"{NAMESPACE}/app-node-0"], "the blocking pod")
        assert lab.version_labels() == dict.fromkeys(NODES, OLD)
        path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/app-node-0"
        lab.patch(path, {"spec": {"minAvailable": 0}})
        lab.wait_complete(NEW)
        assert violations(events()) == []
    assert lab.app_pods() == []
    assert lab.status()["onload"]["blockingPods"] == []


def test_a_node_that_cannot_load_the_module_stops_the_upgrade(lab: Lab) -> None:
    install(lab)
    lab.kmm.set_knobs(fail_load=f"{NAMES.module} {BAD}")
    lab.upgrade(BAD, nodeTimeout="10s")
    lab.wait_condition("Degraded", "True")
    assert lab.version_labels() == {"node-0": BAD, "node-1": OLD, "node-2": OLD}
    assert lab.condition("Ready")["status"] == "False"
    # Rollback by hand.
    with recording(lab.cluster) as events:
        lab.upgrade(OLD, nodeTimeout="5m")
        lab.wait_complete(OLD)
        assert violations(events()) == []
    assert lab.condition("Degraded")["status"] == "False"


def test_automatic_rollback_restores_what_each_node_was_last_verified_on(lab: Lab) -> None:
    install(lab)
    lab.kmm.set_knobs(fail_load=f"node-1 .* {BAD}")
    with recording(lab.cluster) as events:
        lab.upgrade(BAD, nodeTimeout="10s", autoRollback=True)
        lab.wait_condition("Degraded", "True")
        lab.wait(lambda: not lab.problems(OLD, only=["node-1", "node-2"]), f"{OLD} on node-1 and node-2", 90)
        assert lab.version_labels()["node-0"] == BAD, "it was verified"
        assert violations(events()) == []
    history = lab.status()["onload"]["history"]
    assert {each["version"]: each["state"] for each in history} == {BAD: "Failed", OLD: "Verified"}
    assert lab.resource()["spec"]["onload"]["version"] == BAD
    # The next version is tried again.
    lab.kmm.set_knobs()
    lab.upgrade(NEW, nodeTimeout="5m")
    lab.wait_complete(NEW)
    assert lab.condition("Degraded")["status"] == "False"


def test_nodes_on_hold_and_paused_upgrades_wait(lab: Lab) -> None:
    install(lab)
    lab.annotate("node-1", {HOLD: "true"})
    with recording(lab.cluster) as events:
        lab.upgrade(NEW)
        lab.wait(lambda: upgraded(lab, NEW) == {"node-0", "node-2"}, "all nodes but the one on hold")
        assert not lab.problems(OLD, only=["node-1"]) or lab.version_labels()["node-1"] == OLD
        lab.edit({"upgrade": {"paused": True}})
        lab.wait(lambda: lab.resource()["metadata"]["generation"] == lab.status()["observedGeneration"], "the status")
        lab.annotate("node-1", {HOLD: None})
        lab.wait_condition("Progressing", "False", "Paused")
        assert lab.version_labels()["node-1"] == OLD
        lab.edit({"upgrade": {"paused": False}})
        lab.wait_complete(NEW)
        assert violations(events()) == []


def test_a_node_that_joins_during_an_upgrade_gets_the_new_version(lab: Lab) -> None:
    install(lab)
    lab.cluster.apply(app_on("node-0"), budget("app-node-0"))
    lab.upgrade(NEW)
    lab.wait(lambda: lab.status()["onload"]["blockingPods"], "the upgrade of the first node")
    lab.cluster.add_kwok_nodes(1, prefix="joined", labels=SELECTOR)
    try:
        lab.wait(lambda: not lab.problems(NEW, only=["joined-0"]), f"{NEW} on the node that joined")
        lab.cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/app-node-0")
        lab.wait_complete(NEW)
    finally:
        remove(lab, "joined-0")


def test_a_node_deleted_during_its_upgrade_does_not_block_the_others(lab: Lab) -> None:
    lab.cluster.add_kwok_nodes(1, prefix="a-lost", labels=SELECTOR)
    install(lab)
    lab.cluster.apply(app_on("a-lost-0"), budget("app-a-lost-0"))
    lab.upgrade(NEW)
    lab.wait(lambda: lab.status()["onload"]["blockingPods"], "the upgrade of the first node")
    code, _ = lab.cluster.request("DELETE", "/api/v1/nodes/a-lost-0")
    assert code == http.HTTPStatus.OK
    lab.wait_complete(NEW)
    remove(lab, "a-lost-0")


def remove(lab: Lab, node: str) -> None:
    """Deletes a node with its pods, as the control plane does after a minute."""
    lab.cluster.request("DELETE", f"/api/v1/nodes/{node}")
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    for each in lab.items(f"{pods}?fieldSelector=spec.nodeName%3D{node}"):
        lab.cluster.request("DELETE", f"{pods}/{each['metadata']['name']}", {"gracePeriodSeconds": 0})


def test_a_node_that_is_not_ready_stops_the_upgrade_until_it_returns(lab: Lab) -> None:
    install(lab)
    lab.annotate("node-0", {"kwok.x-k8s.io/status": "custom"})
    set_ready(lab, "node-0", ready=False)
    lab.upgrade(NEW)
    lab.wait_condition("Ready", "False")
    lab.wait(lambda: upgraded(lab, NEW) != set(NODES), "an upgrade that is not complete")
    set_ready(lab, "node-0", ready=True)
    lab.annotate("node-0", {"kwok.x-k8s.io/status": None})
    lab.wait_complete(NEW)


def set_ready(lab: Lab, node: str, *, ready: bool) -> None:
    path = f"/api/v1/nodes/{node}/status"
    condition = {"type": "Ready", "status": str(ready), "reason": "Test"}
    code, answer = lab.cluster.request(
        "PATCH", path, {"status": {"conditions": [condition]}}, content="application/strategic-merge-patch+json"
    )
    assert code == http.HTTPStatus.OK, answer


def test_changing_the_selector_moves_modules_and_labels(lab: Lab) -> None:
    install(lab)
    lab.label("node-2", {"example.com/onload": "other"})
    lab.wait(lambda: not any("node-2" in each for each in lab.leftovers()), "the labels of node-2: removed")
    lab.wait(lambda: set(lab.plugins()) == {"node-0", "node-1"}, "the plugin pods")
    lab.edit({"selector": {"example.com/onload": "other"}})
    lab.wait(lambda: set(lab.plugins()) == {"node-2"}, "the plugin pods")
    lab.wait(lambda: not [each for each in lab.leftovers() if "node-2" not in each], "labels of other nodes: removed")
    labels = lab.cluster.get("/api/v1/nodes/node-2")
    assert labels
    assert labels["metadata"]["labels"][MODULE.label(DESIRED)] == OLD
    selectors = [each["spec"]["selector"] for each in lab.kmm.modules()]
    assert selectors == [{"example.com/onload": "other"}] * 2


def test_another_pull_policy_reloads_no_module(lab: Lab) -> None:
    install(lab)
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAMES.daemonset}"

    def has_policy() -> bool:
        pod = (lab.cluster.get(path) or {})["spec"]["template"]["spec"]
        return pod["initContainers"][0]["imagePullPolicy"] == "Always"

    with recording(lab.cluster) as events:
        lab.edit({"onload": {"imagePullPolicy": "Always"}})
        lab.wait(has_policy, "the pull policy in the DaemonSet")
        lab.wait_condition("Ready", "True")
        changed = [each for each in events() if each.version and each.kind == "Pod"]
    pods = [each.name for each in changed if NAME_LABEL in each.thing["metadata"].get("labels", {})]
    assert pods == []
    assert lab.kmm.loaded(MODULE) == lab.kmm.loaded(SFC) == set(NODES)


def test_removal_of_sfc_unloads_its_module_only(lab: Lab) -> None:
    install(lab)
    with recording(lab.cluster) as events:
        lab.upgrade(OLD, sfc=False)
        lab.wait_complete(OLD, sfc=False)
        lab.wait(lambda: not lab.kmm.loaded(SFC), "the module sfc: unloaded")
        assert violations(events()) == []
    assert lab.kmm.loaded(MODULE) == set(NODES)


def test_deletion_removes_all_owned_objects(lab: Lab) -> None:
    install(lab)
    lab.delete()
    lab.wait(lambda: not lab.resource(), "the resource: gone")
    lab.wait(lambda: not lab.kmm.loaded(MODULE) and not lab.kmm.loaded(SFC), "the modules: unloaded")
    lab.wait(lambda: not lab.plugins() and not lab.leftovers(), "plugin pods and labels: gone")


def test_a_resource_that_is_deleted_without_an_operator_is_cleaned_up_later(shared: Lab) -> None:
    with shared.operator():
        install(shared)
    shared.delete()
    with shared.operator():
        shared.wait(lambda: not shared.resource() and not shared.leftovers(), "resource and labels: gone")
        shared.wait(lambda: not shared.kmm.modules() and not shared.plugins(), "Modules and pods: gone")


def test_labels_without_a_resource_are_removed_at_the_start(shared: Lab) -> None:
    shared.label("node-0", {MODULE.label(DESIRED): OLD, NAMES.gate_label: OLD})
    with shared.operator():
        wait_until(lambda: not shared.leftovers(), "labels: deleted")
