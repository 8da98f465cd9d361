"""Rollouts of Onload that change their mind, wait for long, fail or share nodes, with both generations of KMM.

The double of KMM compares images as KMM does: if a Module gets another image with the version that a node has, it
reloads the module at once. Each rollout is recorded: no module is unloaded under a pod, by labels or by KMM itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelplane.onload.names import Names

from .kmm_decisions import DESIRED, ModuleKey
from .objects import Object
from .onload_lab import (
    BAD,
    MODULE,
    NAMES,
    NAMESPACE,
    NEW,
    OLD,
    Lab,
    application,
    onload,
    running_lab,
    unloads_under_pods,
    violations,
)
from .recording import recording
from .test_onload_upgrade import HOLD, NODES, app_on, budget, install, upgraded

pytestmark = [pytest.mark.cluster, pytest.mark.by_turns]

OTHER = "onload2"
OTHER_SELECTOR = {"example.com/other": "true"}


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
        reset(shared)


def reset(lab: Lab) -> None:
    lab.kmm.set_knobs()
    for node in NODES:
        cordon(lab, node, cordoned=False)
        lab.annotate(node, {HOLD: None})
    lab.clear()
    for node in NODES:
        lab.label(node, dict.fromkeys(OTHER_SELECTOR))


@contextmanager
def protected(lab: Lab) -> Iterator[None]:
    """Checks that no module is unloaded under a pod and that one node changes at a time."""
    with recording(lab.cluster) as events:
        yield
        assert violations(events()) == []
        assert unloads_under_pods(events()) == []


def edit_image(lab: Lab, version: str, image: str) -> None:
    """Writes a version with another image of its modules."""
    spec = onload(version)["spec"]["onload"]
    (mapping,) = spec["kernelMappings"]
    lab.edit({"onload": {**spec, "kernelMappings": [{**mapping, "kernelModuleImage": image}]}})


def cordon(lab: Lab, node: str, *, cordoned: bool = True) -> None:
    lab.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": cordoned or None}})


def hold(lab: Lab, *nodes: str, held: bool = True) -> None:
    for node in nodes:
        lab.annotate(node, {HOLD: "" if held else None})


def wait_label(lab: Lab, nodes: int = len(NODES)) -> str:
    """Waits until all nodes are verified on the same label; returns it."""
    lab.wait(lambda: len({*lab.version_labels().values()}) == 1, "one label on all nodes", 120)
    lab.wait_condition("Ready", "True")
    assert lab.status()["onload"]["nodesUpgraded"] == nodes
    (label,) = {*lab.version_labels().values()}
    return label


def wait_modules(lab: Lab, label: str) -> None:
    """Waits until the Modules have a label that begins so."""

    def versions() -> set[str]:
        return {each["spec"]["moduleLoader"]["container"]["version"] for each in lab.kmm.modules()}

    lab.wait(lambda: all(each.startswith(label) for each in versions()), f"Modules: {label}")


def uids(lab: Lab) -> set[str]:
    return {each["metadata"]["uid"] for each in lab.app_pods()}


def run_application(lab: Lab, replicas: int = 6) -> set[str]:
    """The UIDs of its pods, which run on all nodes."""
    lab.cluster.apply(*application(replicas))
    lab.wait(lambda: lab.available() == replicas, "the application")
    return uids(lab)


def step_of(lab: Lab, node: str) -> str:
    found: list[Object] = lab.status()["onload"]["currentNodes"]
    return next((each["step"] for each in found if each["name"] == node), "")


# Versions with several contents


def test_a_version_that_returns_with_another_image_reloads_no_module_under_pods(lab: Lab) -> None:
    install(lab)
    run_application(lab)
    hold(lab, "node-2")
    with protected(lab):
        lab.upgrade(NEW)
        lab.wait(lambda: upgraded(lab, NEW) == {"node-0", "node-1"}, "all nodes but the one on hold")
        edit_image(lab, OLD, "example.com/onload-module:rebuilt")
        lab.wait(lambda: lab.version_labels()["node-0"].startswith(f"{OLD}-"), "another label on node-0")
        assert lab.version_labels()["node-2"] == OLD
        hold(lab, "node-2", held=False)
        assert wait_label(lab).startswith(f"{OLD}-")


def test_a_revert_to_the_image_that_nodes_have_evicts_nothing(lab: Lab) -> None:
    install(lab)
    before = run_application(lab)
    hold(lab, *NODES)
    with protected(lab):
        edit_image(lab, OLD, "example.com/onload-module:rebuilt")
        wait_modules(lab, f"{OLD}-")
        lab.upgrade(OLD)
        wait_modules(lab, OLD)
        hold(lab, *NODES, held=False)
        assert wait_label(lab) == OLD
    assert uids(lab) == before


# Time


def test_an_eviction_longer_than_the_time_limit_is_no_failure(lab: Lab) -> None:
    install(lab)
    lab.cluster.apply(app_on("node-0"), budget("app-node-0"))
    lab.wait(lambda: len(lab.app_pods()) == 1, "the pod")
    with protected(lab):
        lab.upgrade(NEW, nodeTimeout="10s", autoRollback=True)
        lab.wait(lambda: lab.status()["onload"]["blockingPods"], "the blocking pod")
        time.sleep(12)
        path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/app-node-0"
        lab.patch(path, {"spec": {"minAvailable": 0}})
        lab.wait_complete(NEW)
    assert states_of(lab) == {NEW: "Verified", OLD: "Verified"}


def states_of(lab: Lab) -> dict[str, str]:
    """The states of the labels of the history."""
    return {each["label"]: each["state"] for each in lab.status()["onload"]["history"]}


def test_an_operator_that_was_down_longer_than_the_time_limit_continues(shared: Lab) -> None:
    with shared.operator():
        install(shared)
        shared.kmm.set_knobs(load_delay=3)
        shared.upgrade(NEW, nodeTimeout="10s", autoRollback=True)
        shared.wait(lambda: "WaitingFor" in step_of(shared, "node-0"), "a node that waits")
    time.sleep(12)
    with protected(shared), shared.operator():
        shared.wait_complete(NEW)
        assert states_of(shared) == {NEW: "Verified", OLD: "Verified"}
    with shared.operator():
        reset(shared)


# Rollback


def test_a_rollback_leaves_nodes_on_a_version_that_not_all_nodes_have(lab: Lab) -> None:
    install(lab)
    hold(lab, "node-2")
    lab.upgrade(NEW)
    lab.wait(lambda: upgraded(lab, NEW) == {"node-0", "node-1"}, "all nodes but the one on hold")
    lab.wait(lambda: step_of(lab, "node-2") == "Held", "node-1: verified")
    lab.cluster.apply(app_on("node-1"), app_on("node-2"))
    lab.wait(lambda: len(lab.app_pods()) == 2, "the pods")
    before = uids(lab)
    lab.kmm.set_knobs(fail_load=f"{NAMES.module} {BAD}")
    with protected(lab):
        lab.upgrade(BAD, nodeTimeout="10s", autoRollback=True)
        lab.wait_condition("Degraded", "True")
        lab.wait(lambda: not lab.problems(NEW, only=["node-0"]), f"{NEW} on node-0", 90)
        time.sleep(3)
        assert lab.version_labels() == {"node-0": NEW, "node-1": NEW, "node-2": OLD}
    assert uids(lab) == before


# Cordoned nodes


def test_a_cordoned_node_is_upgraded_after_the_others_when_it_is_uncordoned(lab: Lab) -> None:
    install(lab)
    cordon(lab, "node-1")
    with protected(lab):
        lab.upgrade(NEW, nodeTimeout="10s", autoRollback=True)
        lab.wait(lambda: upgraded(lab, NEW) == {"node-0", "node-2"}, "all nodes but the cordoned one", 120)
        lab.wait(lambda: step_of(lab, "node-1") == "Cordoned", "the reason in the status")
        time.sleep(12)
        assert lab.version_labels()["node-1"] == OLD
        assert lab.condition("Degraded")["status"] == "False"
        cordon(lab, "node-1", cordoned=False)
        lab.wait_complete(NEW)


def test_a_node_cordoned_during_its_upgrade_waits_without_a_limit(lab: Lab) -> None:
    """Not `protected`: KMM 1.1 unloads the modules of a node that is cordoned, also under pods."""
    install(lab)
    lab.cluster.apply(app_on("node-0"), budget("app-node-0"))
    lab.wait(lambda: len(lab.app_pods()) == 1, "the pod")
    lab.upgrade(NEW, nodeTimeout="10s", autoRollback=True)
    lab.wait(lambda: lab.status()["onload"]["blockingPods"], "the blocking pod")
    cordon(lab, "node-0")
    path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/app-node-0"
    lab.patch(path, {"spec": {"minAvailable": 0}})
    lab.wait(lambda: not lab.app_pods(), "the pod: evicted")
    time.sleep(12)
    assert lab.condition("Degraded")["status"] == "False", lab.status()
    cordon(lab, "node-0", cordoned=False)
    lab.wait_complete(NEW, timeout=120)
    assert states_of(lab) == {NEW: "Verified", OLD: "Verified"}


# Two resources


def test_a_second_resource_of_a_node_changes_nothing_there(lab: Lab) -> None:
    """Neither while the first one is upgraded, nor when the second one is deleted."""
    install(lab)
    lab.label("node-2", OTHER_SELECTOR)
    lab.create(onload(BAD, name=OTHER, selector=OTHER_SELECTOR))
    other = Names(NAMESPACE, OTHER)

    def overlap() -> bool:
        conditions = lab.resource(OTHER).get("status", {}).get("conditions", [])
        return any((each["type"], each["reason"]) == ("Degraded", "SelectorOverlap") for each in conditions)

    lab.wait(overlap, "SelectorOverlap")
    lab.cluster.apply(*application(6))
    lab.wait(lambda: lab.available() == 6, "the application")
    with protected(lab):
        lab.upgrade(NEW)
        lab.wait(lambda: set(lab.version_labels().values()) == {NEW}, f"{NEW} on all nodes", 120)
        lab.wait(lambda: lab.status()["onload"]["nodesUpgraded"] == len(NODES), "all nodes: verified")
        labels = lab.kmm.labels("node-2")
        assert not {other.gate_label, ModuleKey(NAMESPACE, other.module).label(DESIRED)} & labels.keys()
        lab.wait(lambda: lab.available() == 6, "the application")
        before = uids(lab)
        lab.delete(OTHER)
        lab.wait(lambda: not lab.resource(OTHER), "the second resource: gone")
        lab.wait_complete(NEW)
    assert uids(lab) == before
    assert lab.kmm.loaded(MODULE) == set(NODES)
