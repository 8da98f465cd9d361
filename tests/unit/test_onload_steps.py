"""The decisions about nodes: tables, and a model of the cluster with any order of events."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onloadcluster import Cluster, app_pod, plugin_pod, progress, working
from onloadsteps import NEW, NOW, OLD, TARGET, act, step, waited

from accelplane.onload.node_steps import READY_WAIT, STATUS_WAIT, TERMINATING_WAIT
from accelplane.onload.observed import NodeView, format_progress, parse_progress
from accelplane.onload.plan import Target
from accelplane.onload.steps import decide


def with_sfc(target: Target = TARGET) -> Target:
    return msgspec.structs.replace(target, sfc=True)


def test_a_new_node_is_labelled_in_the_order_of_the_go_operator() -> None:
    node = NodeView(name="a")
    assert step(node) == ("LabellingModule", {"module": NEW})
    node = NodeView(name="a", module=NEW, module_loaded=True, progress=progress(NEW))
    assert step(node) == ("SettingGate", {"gate": NEW})
    node = msgspec.structs.replace(node, gate=NEW)
    assert step(node) == ("Verifying", {})
    node = msgspec.structs.replace(node, plugins=(plugin_pod(),))
    assert step(node) == ("Verified", {})
    assert act(node).removes_progress


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("Pending", {})),
        ({"progress": progress(NEW, upgrade=True)}, ("RemovingGate", {"gate": None})),
        ({"gate": None}, ("WaitingForPluginPod", {})),
        ({"gate": None, "plugins": (), "apps": (app_pod(),)}, ("WaitingForNodeStatus", {})),
        ({"gate": None, "plugins": ()}, ("WaitingForNodeStatus", {})),
        ({"gate": None, "plugins": (), "apps": (app_pod(),), "ready": False}, ("Evicting", {})),
        ({"gate": None, "plugins": (), "apps": (app_pod(),), "advertised": False}, ("Evicting", {})),
        ({"gate": None, "plugins": (), "apps": (app_pod(is_terminating=True),), "advertised": False}, ("Evicting", {})),
        ({"gate": None, "plugins": (), "advertised": False}, ("RemovingModule", {"module": None})),
        ({"gate": None, "plugins": (), "module": None}, ("WaitingForModulePods", {})),
        ({"gate": None, "plugins": (), "module": None, "module_loaded": False}, ("LabellingModule", {"module": NEW})),
        (
            {"gate": None, "plugins": (), "module": None, "module_loaded": False, "module_pods": 1},
            ("WaitingForModulePods", {}),
        ),
    ],
)
def test_an_upgrade_of_a_node_has_the_order_of_the_go_operator(
    changes: dict[str, Any], expected: tuple[str, dict[str, str | None]]
) -> None:
    started = {"progress": progress(NEW, upgrade=True)} if changes else {}
    node = working("b", OLD, **(started | changes))
    others = [] if changes else [working("a", OLD)]
    plan = decide(TARGET, [node, *others], NOW)
    found = next(each for each in plan.steps if each.node == "b")
    assert (found.step, dict(found.action.labels) if found.action else {}) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gate": None, "plugins": (), "advertised": False}, ("RemovingModule", {"module": None})),
        ({"gate": None, "plugins": (), "module": None}, ("WaitingForUnload", {})),
        ({"gate": None, "plugins": (), "module": None, "module_loaded": False}, ("RemovingSfc", {"sfc": None})),
        (
            {"gate": None, "plugins": (), "module": None, "module_loaded": False, "sfc": None},
            ("WaitingForModulePods", {}),
        ),
        (
            {
                "gate": None,
                "plugins": (),
                "module": None,
                "module_loaded": False,
                "sfc": None,
                "sfc_loaded": False,
            },
            ("LabellingSfc", {"sfc": NEW}),
        ),
        (
            {
                "gate": None,
                "plugins": (),
                "module": None,
                "module_loaded": False,
                "sfc": NEW,
                "sfc_loaded": False,
            },
            ("WaitingForSfc", {}),
        ),
        (
            {"gate": None, "plugins": (), "module": None, "module_loaded": False, "sfc": NEW},
            ("LabellingModule", {"module": NEW}),
        ),
    ],
)
def test_onload_is_unloaded_before_sfc_and_loaded_after_it(
    changes: dict[str, Any], expected: tuple[str, dict[str, str | None]]
) -> None:
    node = working("a", OLD, sfc=True, progress=progress(NEW, upgrade=True))
    assert step(msgspec.structs.replace(node, **changes), with_sfc()) == expected


def test_sfc_is_added_and_removed_only_while_onload_is_unloaded() -> None:
    assert step(working("a", NEW), with_sfc()) == ("RemovingGate", {"gate": None})
    assert step(working("a", NEW, sfc=True)) == ("RemovingGate", {"gate": None})
    for target, sfc in ((with_sfc(), False), (TARGET, True)):
        cluster = Cluster([working("a", NEW, sfc=sfc, apps=(app_pod(),))])
        assert cluster.run(target).is_complete
        assert cluster.nodes["a"].sfc == (NEW if target.sfc else None)


@pytest.mark.parametrize("sfc", [False, True])
@pytest.mark.parametrize("gate", [None, OLD, NEW])
@pytest.mark.parametrize("module", [None, OLD, NEW])
def test_every_combination_of_labels_converges(module: str | None, gate: str | None, sfc: bool) -> None:
    node = working("a", OLD, module=module, gate=gate, apps=(app_pod(),))
    node = msgspec.structs.replace(node, plugins=node.plugins if gate else (), module_loaded_version=module)
    cluster = Cluster([node, working("b", OLD)])
    assert cluster.run(with_sfc() if sfc else TARGET).is_complete
    assert {(node.module, node.gate, node.sfc) for node in cluster.nodes.values()} == {(NEW, NEW, NEW if sfc else None)}


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


def test_a_plugin_pod_of_another_revision_is_replaced_without_evictions() -> None:
    cluster = Cluster([working(name, NEW, apps=(app_pod(),)) for name in ("a", "b")], revision="new")
    target = msgspec.structs.replace(TARGET, revision="new")
    assert cluster.run(target).is_complete
    assert all(node.apps and node.plugins[0].revision == "new" for node in cluster.nodes.values())
    assert cluster.most_down == 1


def test_pods_of_the_go_operator_stay_until_the_revision_changes() -> None:
    node = working("a", NEW, plugins=(plugin_pod(None),))
    assert step(node, msgspec.structs.replace(TARGET, adopted_revision="r")) == ("Verified", {})
    assert step(node, msgspec.structs.replace(TARGET, adopted_revision="r", revision="new"))[0] == "ReplacingPluginPod"


def test_without_kmm_only_the_gate_is_used() -> None:
    external = msgspec.structs.replace(TARGET, kmm=False)
    cluster = Cluster([NodeView(name="a"), NodeView(name="b", gate=OLD, plugins=(plugin_pod(),), apps=(app_pod(),))])
    assert cluster.run(external).is_complete
    assert {(node.module, node.gate) for node in cluster.nodes.values()} == {(None, NEW)}
    assert cluster.nodes["b"].apps


@pytest.mark.parametrize("reports", [True, False], ids=["KMM unloads", "KMM is gone"])
def test_labels_of_kmm_are_removed_when_the_modules_are_loaded_otherwise(reports: bool) -> None:
    external = msgspec.structs.replace(TARGET, kmm=False)
    nodes = [working(name, NEW, sfc=True, apps=(app_pod(),), module_pods=0 if reports else 1) for name in ("a", "b")]
    cluster = Cluster(nodes)
    plan = cluster.run(external)
    assert plan.is_complete, plan.steps
    assert {(node.module, node.sfc, node.gate) for node in cluster.nodes.values()} == {(None, None, NEW)}
    assert cluster.most_down == 1


def test_a_node_that_is_no_longer_selected_is_released_in_a_safe_order() -> None:
    cluster = Cluster([working("a", NEW, sfc=True, selected=False, apps=(app_pod(),)), working("b", NEW, sfc=True)])
    assert cluster.run(with_sfc()).is_complete
    assert cluster.nodes["a"].is_clean
    assert cluster.nodes["b"].module == NEW


def test_unselected_nodes_are_released_one_at_a_time() -> None:
    nodes = [working(name, NEW, selected=False) for name in ("a", "b")]
    assert [each.node for each in decide(TARGET, nodes, NOW).actions] == ["a"]


def test_deletion_releases_all_nodes_simultaneously_also_held_and_paused_ones() -> None:
    target = Target(version="", deleting=True)
    nodes = [working("a", NEW, held=True, apps=(app_pod(),)), working("b", OLD), NodeView(name="c", gate=NEW)]
    assert [dict(each.labels) for each in decide(target, nodes, NOW).actions] == [{"gate": None}] * 3
    cluster = Cluster(nodes)
    assert cluster.run(target).is_complete
    assert all(node.is_clean for node in cluster.nodes.values())


def test_deletion_does_not_wait_for_nodes_that_are_not_ready() -> None:
    node = working("a", NEW, ready=False, apps=(app_pod(),))
    assert act(node, Target(version="", deleting=True)).removes_progress


def test_deletion_does_not_wait_for_a_kmm_that_is_gone() -> None:
    node = working("a", NEW, sfc=True, gate=None, plugins=(), module=None, progress=progress(""))
    target = Target(version="", deleting=True)
    assert step(node, target) == ("WaitingForUnload", {})
    assert step(node, target, READY_WAIT) == ("RemovingSfc", {"sfc": None})


def test_another_version_during_an_upgrade_begins_a_new_change() -> None:
    node = working("a", OLD, gate=None, plugins=(), progress=progress("8.3", started=1, upgrade=True, advertised=True))
    action = act(node)
    assert action.progress == progress(NEW, started=0, upgrade=True, advertised=True), "the time is added by the write"


def test_rollback_continues_with_the_failed_node_first() -> None:
    failed = working("b", NEW, plugins=(), progress=progress(NEW, upgrade=True))
    back = Target(version=OLD, revision="r")
    plan = decide(back, [working("a", NEW), failed], NOW)
    assert [each.node for each in plan.actions] == ["b"]
    cluster = Cluster([working("a", NEW), failed])
    cluster.broken_versions = {NEW}
    assert cluster.run(back).is_complete
    assert cluster.most_down == 1


def test_a_node_that_was_lost_during_the_upgrade_does_not_prevent_the_rollback_of_the_others() -> None:
    lost = working("a", NEW, ready=False, plugins=(), progress=progress(NEW, upgrade=True))
    cluster = Cluster([lost, working("b", NEW), working("c", NEW), working("d", OLD)])
    back = Target(version=OLD, revision="r", rolls_back=True)
    cluster.run(back)
    assert {cluster.nodes[name].gate for name in "bcd"} == {OLD}
    assert cluster.nodes["a"].gate is None
    assert not decide(msgspec.structs.replace(back, rolls_back=False), [lost, working("b", NEW)], NOW).actions[1:]


def test_during_a_rollback_nodes_keep_or_get_another_version_than_the_target() -> None:
    keeping = working("a", NEW, apps=(app_pod(),))
    returning = working("b", "8.3", plugins=(), progress=progress("8.3", upgrade=True, verified="7.0"))
    target = msgspec.structs.replace(TARGET, version=OLD, rolls_back=True, others={"a": NEW, "b": "7.0"})
    plan = decide(target, [keeping, returning, working("c", OLD)], NOW)
    assert [(each.step, each.message) for each in plan.steps] == [
        ("Verified", f"keeps version {NEW}"),
        ("Pending", f"returns to version 7.0 after nodes that return to {OLD}"),
        ("Verified", ""),
    ]
    assert not plan.actions
    assert not plan.is_complete


def test_progress_records_what_a_node_was_verified_on() -> None:
    pod = msgspec.structs.replace(plugin_pod(), user_image="user:1")
    node = working("a", OLD, plugins=(pod,))
    written = act(node).progress
    assert written is not None
    assert (written.verified, written.user_image) == (OLD, "user:1")
    again = act(working("a", OLD, gate=None, plugins=(), advertised=False, progress=written)).progress
    assert again == written


def test_a_node_cordoned_by_the_go_operator_counts_until_it_is_verified() -> None:
    node = NodeView(name="a", module=OLD, sfc=OLD)
    target = with_sfc()
    plan = decide(target, [node, working("b", OLD)], NOW)
    (action,) = plan.actions
    assert (action.node, action.step) == ("a", "RemovingModule")
    assert action.progress
    node = msgspec.structs.replace(node, module=None, progress=action.progress)
    assert {each.node for each in decide(target, [node, working("b", OLD)], NOW).actions} == {"a"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"target": 1}', "x" * 5000, '{"target":"a","started":"b"}'])
def test_unreadable_upgrade_progress_starts_anew(text: str) -> None:
    found = parse_progress(text)
    assert found is not None
    assert (found.target, found.upgrade) == ("", True)


def test_progress_is_written_and_read() -> None:
    written = progress(NEW, upgrade=True, advertised=True)
    assert parse_progress(format_progress(written)) == written
    assert parse_progress(None) is None


LABEL = st.sampled_from([None, OLD, NEW, "7.0"])
NODES = st.builds(
    lambda module, gate, sfc, loaded, apps, plugin: {
        "module": module,
        "gate": gate,
        "sfc": sfc,
        "module_loaded": loaded or module is not None,
        "module_loaded_version": module,
        "sfc_loaded": sfc is not None,
        "sfc_loaded_version": sfc,
        "apps": (app_pod(),) if apps else (),
        "plugins": (plugin_pod(plugin),) if gate is not None else (),
    },
    LABEL,
    LABEL,
    LABEL,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["r", "old", None]),
)
EVENTS = st.one_of(
    st.tuples(st.just("decide")),
    st.tuples(st.just("decide")),
    st.tuples(st.just("react"), st.integers(0, 3)),
    st.tuples(st.just("react"), st.integers(0, 3)),
    st.tuples(st.just("time"), st.sampled_from([1, 30, 1000])),
    st.tuples(st.just("app"), st.integers(0, 3)),
    st.tuples(st.just("protect"), st.integers(0, 3)),
    st.tuples(st.just("ready"), st.integers(0, 3)),
    st.tuples(st.just("held"), st.integers(0, 3)),
    st.tuples(st.just("version"), st.sampled_from([OLD, NEW])),
    st.tuples(st.just("sfc"), st.booleans()),
    st.tuples(st.just("kmm"), st.booleans()),
    st.tuples(st.just("select"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("paused"), st.booleans()),
)


def apply_event(cluster: Cluster, target: Target, event: tuple[Any, ...]) -> Target:
    """One event. Returns the target after it."""
    names = list(cluster.nodes)
    name = names[event[1] % len(names)] if len(event) > 1 and isinstance(event[1], int) else ""
    node = cluster.nodes.get(name)
    match event[0], node:
        case "decide", _:
            for action in cluster.decide(target).actions:
                cluster.apply(action)
        case "react", NodeView():
            cluster.react(name)
        case "time", _:
            cluster.now += event[1]
        case "app", NodeView(advertised=True):
            cluster.change(name, apps=(*node.apps, app_pod()) if len(node.apps) < 3 else node.apps)
        case "protect", NodeView():
            cluster.protected ^= {name}
        case "ready" | "held", NodeView():
            cluster.change(name, **{event[0]: not getattr(node, event[0])})
        case "version" | "sfc" | "kmm" | "paused", _:
            return msgspec.structs.replace(target, **{event[0]: event[1]})
        case "select", NodeView():
            cluster.change(name, selected=event[2])
        case _:
            pass
    return target


@pytest.mark.untraced
@settings(deadline=None)
@given(
    nodes=st.lists(NODES, min_size=1, max_size=4),
    events=st.lists(EVENTS, max_size=60),
    limit=st.integers(1, 3),
    strict=st.booleans(),
)
def test_any_order_of_events_ends_in_the_desired_state(
    nodes: list[dict[str, Any]], events: list[tuple[Any, ...]], limit: int, strict: bool
) -> None:
    views = [msgspec.structs.replace(NodeView(name=f"n{index}"), **each) for index, each in enumerate(nodes)]
    cluster = Cluster(views)
    target = msgspec.structs.replace(TARGET, max_unavailable=limit, strict=strict)
    for event in events:
        target = apply_event(cluster, target, event)
    assert cluster.most_down <= limit
    cluster.protected.clear()
    for name in cluster.nodes:
        cluster.change(name, ready=True, held=False)
    target = msgspec.structs.replace(target, paused=False, node_timeout=1e9)
    plan = cluster.run(target)
    assert plan.is_complete, plan.steps
    assert cluster.most_down <= limit
    for node in cluster.nodes.values():
        module = target.version if target.kmm else None
        expected = (module, module if target.sfc else None, target.version, None)
        found = (node.module, node.sfc, node.gate, node.progress)
        assert found == (expected if node.selected else (None, None, None, None))
    for action in cluster.decide(Target(version="", deleting=True)).actions:
        cluster.apply(action)
    assert cluster.run(Target(version="", deleting=True)).is_complete
    assert all(node.is_clean for node in cluster.nodes.values())


@pytest.mark.parametrize("order", [*itertools.permutations(["a", "b", "c"])])
def test_the_order_of_nodes_is_that_of_their_names(order: tuple[str, ...]) -> None:
    plan = decide(TARGET, [working(name, OLD) for name in order], NOW)
    assert [each.node for each in plan.steps] == ["a", "b", "c"]
