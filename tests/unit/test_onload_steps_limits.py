"""Which nodes start, time limits, and what prevents that a node continues."""

import itertools
from typing import Any

import msgspec
import pytest
from onloadcluster import app_pod, plugin_pod, progress, working
from onloadsteps import NEW, NOW, OLD, TARGET, act, step, waited, with_sfc

from accelplane.onload.node_steps import STATUS_WAIT, TERMINATING_WAIT
from accelplane.onload.observed import NodeView
from accelplane.onload.steps import decide


@pytest.mark.parametrize(
    ("limit", "started"), [(1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"]), (9, ["a", "b", "c"])]
)
def test_only_max_unavailable_nodes_start(limit: int, started: list[str]) -> None:
    nodes = [working(name, OLD) for name in ("c", "a", "b")]
    plan = decide(msgspec.structs.replace(TARGET, max_unavailable=limit), nodes, NOW)
    assert [action.node for action in plan.actions] == started


@pytest.mark.parametrize(
    ("changes", "reason"), [({"held": True}, "Held"), ({"ready": False}, "NodeNotReady")], ids=["hold", "not ready"]
)
def test_nodes_that_must_not_start_are_skipped(changes: dict[str, Any], reason: str) -> None:
    plan = decide(TARGET, [working("a", OLD, **changes), working("b", OLD)], NOW)
    assert [action.node for action in plan.actions] == ["b"]
    assert plan.steps[0].step == reason


def test_a_new_node_on_hold_gets_no_label() -> None:
    assert step(NodeView(name="a", held=True)) == ("Held", {})
    installing = NodeView(name="a", held=True, module=NEW, module_loaded=True, progress=progress(NEW))
    assert step(installing) == ("SettingGate", {"gate": NEW})
    verified = working("a", NEW, held=True)
    assert step(verified) == ("Verified", {})
    assert step(NodeView(name="a", held=True, module=OLD))[0] == "RemovingModule", "the Go operator has started it"


def test_a_paused_upgrade_finishes_nodes_and_starts_none() -> None:
    target = msgspec.structs.replace(TARGET, paused=True, max_unavailable=5)
    started = working("b", OLD, gate=None, plugins=(), advertised=False, progress=progress(NEW, upgrade=True))
    plan = decide(target, [working("a", OLD), started], NOW)
    assert [action.node for action in plan.actions] == ["b"]
    assert plan.steps[0].message == "the upgrade is paused"


def test_a_node_over_its_time_limit_stops_the_upgrade() -> None:
    stuck = working("a", NEW, plugins=(), progress=progress(NEW, upgrade=True))
    nodes = [stuck, working("b", OLD)]
    target = msgspec.structs.replace(TARGET, max_unavailable=2, node_timeout=60)
    assert [each.node for each in waited(59, *nodes, target=target).actions] == ["b"]
    plan = waited(60, *nodes, target=target)
    assert [each.node for each in plan.overdue] == ["a"]
    assert not plan.actions
    assert "exceeded its time limit" in plan.steps[1].message


def test_an_eviction_has_a_time_limit_of_its_own() -> None:
    node = working("a", OLD, gate=None, plugins=(), apps=(app_pod(),), progress=progress(NEW, upgrade=True))
    node = msgspec.structs.replace(node, advertised=False)
    assert not waited(1e5, node).overdue
    limited = msgspec.structs.replace(TARGET, eviction_timeout=300)
    assert not waited(299, node, target=limited).overdue
    assert waited(300, node, target=limited).overdue


def test_a_step_that_acts_is_not_overdue_after_a_long_eviction() -> None:
    node = working("a", OLD, gate=None, plugins=(), advertised=False, progress=progress(NEW, started=0, upgrade=True))
    evicting = msgspec.structs.replace(node, apps=(app_pod(),))
    plan = waited(36_000, evicting)
    assert (plan.steps[0].step, plan.overdue) == ("Evicting", ())
    plan = decide(TARGET, [node], NOW + 36_000, plan.waits)
    assert (plan.steps[0].step, plan.steps[0].wait, plan.overdue) == ("RemovingModule", None, ())
    unloading = msgspec.structs.replace(node, module=None, module_loaded=True)
    assert not decide(TARGET, [unloading], NOW + 36_001, plan.waits).overdue


@pytest.mark.parametrize("gap", [1e9, -1e9])
def test_only_observed_time_counts(gap: float) -> None:
    node = working("a", NEW, plugins=(), progress=progress(NEW, started=1, upgrade=True))
    assert not decide(TARGET, [node], NOW).overdue, "the operator was restarted"
    plan = decide(TARGET, [node], NOW + gap, decide(TARGET, [node], NOW).waits)
    assert not plan.overdue, "the operator was stopped, or the clock was changed"
    assert waited(TARGET.node_timeout, node).overdue


def test_the_time_limit_belongs_to_the_revision_of_the_plugin_pod() -> None:
    """A corrected image of the userland does not inherit the time of the one that did not work."""
    node = working("a", NEW, plugins=(plugin_pod("r", is_ready=False),), progress=progress(NEW, upgrade=True))
    plan = waited(TARGET.node_timeout, node)
    assert plan.overdue
    node = msgspec.structs.replace(node, plugins=(plugin_pod("fixed", is_ready=False),))
    fixed = msgspec.structs.replace(TARGET, revision="fixed")
    assert not decide(fixed, [node], NOW + TARGET.node_timeout, plan.waits).overdue


TAKEN_DOWN: dict[str, Any] = {"gate": None, "plugins": (), "advertised": False}


def test_static_pods_are_not_evicted_and_named() -> None:
    static = msgspec.structs.replace(app_pod("static"), is_static=True)
    node = working("a", OLD, **TAKEN_DOWN, progress=progress(NEW, upgrade=True), apps=(static, app_pod("other")))
    assert [each.key.name for each in act(node).evict] == ["other"]
    (found,) = decide(TARGET, [msgspec.structs.replace(node, apps=(static,))], NOW).steps
    assert found.action is None
    assert found.problem is not None
    assert found.problem.reason == "StaticPods"
    assert "default/static" in found.problem.message


def test_pods_that_are_being_deleted_for_ever_are_named() -> None:
    apps = (app_pod("stuck", is_terminating=True),)
    node = working("a", OLD, **TAKEN_DOWN, progress=progress(NEW, upgrade=True), apps=apps)
    plan = decide(TARGET, [node], NOW)
    assert (plan.actions, plan.steps[0].problem) == ((), None)
    found = waited(TERMINATING_WAIT, node).steps[0].problem
    assert found is not None
    assert (found.reason, "default/stuck" in found.message) == ("PodsTerminating", True)


def test_failed_pods_of_kmm_are_named() -> None:
    node = working("a", NEW, **TAKEN_DOWN, progress=progress(NEW, upgrade=True), module_loaded=False)
    node = msgspec.structs.replace(node, module_loaded_version=None, failed_module_pods=("kmm-worker-a",))
    found = decide(TARGET, [node], NOW).steps[0]
    assert found.problem is not None
    assert (found.problem.reason, "kmm-worker-a" in found.message) == ("ModulePodsFailed", True)


def test_an_application_that_holds_the_former_module_is_evicted_or_named() -> None:
    """Another program has set the labels of the new version while the former module is loaded."""
    node = working("a", NEW, **TAKEN_DOWN, module_loaded_version=OLD, apps=(app_pod(),))
    assert step(node)[0] == "Pending"
    started = act(node)
    assert started.progress is not None
    assert started.progress.upgrade
    assert [each.key.name for each in act(msgspec.structs.replace(node, progress=started.progress)).evict] == ["app"]
    running = working("a", NEW, module_loaded_version=OLD, apps=(app_pod(),))
    assert decide(TARGET, [running], NOW).steps[0].message == (
        f"waits for module version {NEW}, found {OLD}, used by default/app"
    )


def test_a_module_is_not_unloaded_under_the_probe_pod() -> None:
    node = working("a", OLD, **TAKEN_DOWN, progress=progress(NEW, upgrade=True), probe="running")
    assert step(node) == ("WaitingForProbePod", {})
    assert act(node).delete_probe
    assert step(msgspec.structs.replace(node, probe="terminating")) == ("WaitingForProbePod", {})
    assert step(msgspec.structs.replace(node, probe="failed"))[0] == "RemovingModule"


def test_a_cordoned_node_waits_without_a_limit() -> None:
    node = working("a", NEW, plugins=(), progress=progress(NEW, upgrade=True), cordoned=True)
    plan = waited(1e4, node)
    assert not plan.overdue
    assert plan.steps[0].message == "waits for a ready device plugin pod; the node is cordoned"


def test_the_time_for_which_a_node_was_cordoned_does_not_count() -> None:
    node = working("a", NEW, plugins=(), progress=progress(NEW, upgrade=True))
    target = msgspec.structs.replace(TARGET, node_timeout=60)
    plan = waited(600, msgspec.structs.replace(node, cordoned=True), target=target)
    for seconds, overdue in [(600, []), (630, []), (659, []), (660, ["a"])]:
        plan = decide(target, [node], NOW + seconds, plan.waits)
        assert [each.node for each in plan.overdue] == overdue, seconds


def test_a_module_that_does_not_unload_is_not_polled() -> None:
    node = working("a", NEW, sfc=True, selected=False, gate=None, plugins=(), module=None, advertised=False)
    plan = waited(600, node, target=with_sfc())
    assert (plan.steps[0].step, plan.retry) == ("WaitingForUnload", 0)


def test_a_new_node_over_its_time_limit_does_not_stop_the_upgrade() -> None:
    fresh = NodeView(name="a", module=NEW, gate=NEW, progress=progress(NEW))
    plan = waited(TARGET.node_timeout, fresh, working("b", OLD))
    assert plan.overdue
    assert [each.node for each in plan.actions] == ["b"]


def test_pods_that_are_being_deleted_are_not_evicted_again() -> None:
    apps = (app_pod("one", is_terminating=True), app_pod("two"))
    taken_down = {"gate": None, "plugins": (), "advertised": False}
    node = working("a", OLD, **taken_down, apps=apps, progress=progress(NEW, upgrade=True))
    assert [pod.key.name for pod in act(node).evict] == ["two"]


@pytest.mark.parametrize("change", [{}, {"selected": False}])
def test_a_node_that_reports_no_status_is_waited_for_in_a_limited_time(change: dict[str, Any]) -> None:
    """The kubelet rejects pods that are assigned until it reports that the resource is not advertised any more."""
    node = working("a", OLD, gate=None, plugins=(), apps=(app_pod(),), progress=progress(NEW, upgrade=True), **change)
    plan = decide(TARGET, [node], NOW)
    assert (plan.steps[0].step, plan.actions, plan.retry) == ("WaitingForNodeStatus", (), STATUS_WAIT)
    assert plan.steps[0].message == "the node still advertises amd.com/onload"
    assert step(msgspec.structs.replace(node, advertised=False)) == ("Evicting", {})
    assert step(node, seconds=STATUS_WAIT) == ("Evicting", {})
    without_pods = msgspec.structs.replace(node, apps=())
    assert step(without_pods)[0] == "WaitingForNodeStatus"
    assert step(without_pods, seconds=STATUS_WAIT) == ("RemovingModule", {"module": None})


@pytest.mark.parametrize("order", [*itertools.permutations(["a", "b", "c"])])
def test_the_order_of_nodes_is_that_of_their_names(order: tuple[str, ...]) -> None:
    plan = decide(TARGET, [working(name, OLD) for name in order], NOW)
    assert [each.node for each in plan.steps] == ["a", "b", "c"]
