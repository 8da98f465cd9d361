"""Steps of an Onload upgrade: verification of nodes, and probe pods."""

from typing import Any

import msgspec
import pytest
from onloadcluster import Cluster, plugin_pod, progress, working
from onloadsteps import NEW, NOW, OLD, TARGET, act, step, waited

from accelplane.onload.node_steps import READY_WAIT
from accelplane.onload.observed import NodeView
from accelplane.onload.steps import decide
from accelplane.onload.waits import OBSERVATION_INTERVAL


def test_the_gate_waits_for_the_module_only_for_a_limited_time() -> None:
    node = NodeView(name="a", module=NEW, progress=progress(NEW))
    plan = decide(TARGET, [node], NOW)
    assert (plan.steps[0].step, plan.retry) == ("WaitingForModule", READY_WAIT)
    after = waited(READY_WAIT, node)
    assert after.steps[0].skipped_wait
    assert after.actions[0].labels == {"gate": NEW}
    strict = msgspec.structs.replace(TARGET, strict=True)
    assert step(node, strict, READY_WAIT) == ("WaitingForModule", {})
    assert decide(strict, [node], NOW).retry == OBSERVATION_INTERVAL


def test_a_module_of_another_version_is_not_the_loaded_one() -> None:
    node = NodeView(name="a", module=NEW, module_loaded=True, module_loaded_version=OLD, progress=progress(NEW))
    assert step(node)[0] == "WaitingForModule"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plugins": ()}, "a ready device plugin pod"),
        ({"plugins": (plugin_pod(is_ready=False),)}, "a ready device plugin pod"),
        ({"plugins": (plugin_pod(is_terminating=True),)}, "a ready device plugin pod"),
        ({"module_loaded_version": OLD}, f"module version {NEW}, found {OLD}"),
        ({"advertised": False}, "the resource amd.com/onload"),
    ],
)
def test_a_node_is_not_verified_before_its_module_is_loaded(changes: dict[str, Any], message: str) -> None:
    node = working("a", NEW, progress=progress(NEW, upgrade=True, advertised=True), **changes)
    (found,) = decide(TARGET, [node], NOW).steps
    assert (found.step, found.message) == ("Verifying", f"waits for {message}")


def test_the_plugin_pod_of_an_upgraded_node_has_to_stay_ready() -> None:
    target = msgspec.structs.replace(TARGET, min_ready=10)
    pod = msgspec.structs.replace(plugin_pod(), ready_since=1000)
    node = working("a", NEW, progress=progress(NEW, upgrade=True), plugins=(pod,))
    plan = decide(target, [node], NOW + 9)
    assert (plan.steps[0].message, plan.retry) == ("the device plugin pod has to be ready for 10 s", 1)
    assert act(node, target, NOW + 10).removes_progress
    new = msgspec.structs.replace(node, progress=progress(NEW))
    assert act(new, target, NOW).removes_progress


def test_a_probe_pod_has_to_succeed() -> None:
    target = msgspec.structs.replace(TARGET, probe=True)
    node = working("a", NEW, progress=progress(NEW))
    assert act(node, target).create_probe
    for state in ("running", "failed"):
        assert step(msgspec.structs.replace(node, probe=state), target) == ("Verifying", {})
    assert act(msgspec.structs.replace(node, probe="succeeded"), target).removes_progress


def test_a_failed_probe_pod_is_created_again_after_a_minute() -> None:
    target = msgspec.structs.replace(TARGET, probe=True)
    node = working("a", NEW, probe="failed", probe_since=NOW, progress=progress(NEW, started=400))
    plan = decide(target, [node], NOW + 59)
    assert (plan.actions, plan.retry) == ((), 1)
    assert plan.steps[0].wait is not None, "the time limit stays"
    action = act(node, target, NOW + 60)
    assert action.delete_probe
    assert not action.patches
    terminating = msgspec.structs.replace(node, probe="terminating")
    assert step(terminating, target, 60) == ("Verifying", {})
    action = act(msgspec.structs.replace(node, probe="none"), target, NOW + 60)
    assert action.create_probe
    assert not action.patches


def test_a_node_is_verified_after_its_probe_pod_failed_twice() -> None:
    cluster = Cluster([working("a", OLD), working("b", OLD)])
    cluster.failing_probes = 2
    target = msgspec.structs.replace(TARGET, probe=True)
    assert cluster.run(target).is_complete
    assert cluster.most_down == 1
    assert cluster.now >= NOW + 120


def test_a_probe_pod_that_always_fails_exceeds_the_time_limit_and_is_still_created_again() -> None:
    cluster = Cluster([working("a", OLD), working("b", OLD)])
    cluster.failing_probes = 10**6
    target = msgspec.structs.replace(TARGET, probe=True)
    plan = cluster.run(target, passes=300)
    assert [each.node for each in plan.overdue] == ["a"]
    assert cluster.nodes["b"] == working("b", OLD)
    cluster.failing_probes = 0
    cluster.run(target, passes=30)
    assert cluster.nodes["a"].progress is None


def test_strict_verification_requires_the_module_and_the_resource() -> None:
    target = msgspec.structs.replace(TARGET, strict=True)
    node = working("a", NEW, progress=progress(NEW), module_loaded=False, advertised=False, module_loaded_version=None)
    (found,) = decide(target, [node], NOW).steps
    assert found.message == "waits for the module onload, the resource amd.com/onload"
    assert act(node).removes_progress
