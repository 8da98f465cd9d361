"""Nodes during a change of the target: another version, rollbacks, kept labels, and the progress in the annotation."""

import msgspec
import pytest
from onloadcluster import Cluster, app_pod, plugin_pod, progress, working
from onloadsteps import NEW, NOW, OLD, TARGET, act, step, waited, with_sfc

from accelplane.onload.observed import NodeView, format_progress, parse_progress
from accelplane.onload.plan import Target
from accelplane.onload.steps import decide


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


KEEPING = msgspec.structs.replace(TARGET, keeps={"a": OLD})


def test_a_node_that_keeps_its_label_is_verified_and_gets_new_plugin_pods() -> None:
    node = working("a", OLD, apps=(app_pod(),))
    assert step(node, KEEPING) == ("Verified", {})
    outdated = msgspec.structs.replace(node, plugins=(plugin_pod("old"),))
    assert step(outdated, KEEPING) == ("ReplacingPluginPod", {})
    cluster = Cluster([outdated, working("b", OLD)])
    assert cluster.run(KEEPING).is_complete
    assert [(each.gate, len(each.apps)) for each in cluster.nodes.values()] == [(OLD, 1), (NEW, 0)]


def test_a_node_that_keeps_its_label_gets_its_gate_again() -> None:
    node = working("a", OLD, gate=None, plugins=(), advertised=False, progress=progress(OLD, upgrade=True))
    assert step(node, KEEPING) == ("SettingGate", {"gate": OLD})


def test_a_node_on_which_kmm_does_not_load_the_kept_label_gets_the_new_one() -> None:
    node = working("a", OLD, module_loaded=False, module_loaded_version=None)
    plan = waited(KEEPING.node_timeout - 1, node, target=KEEPING)
    assert (plan.steps[0].step, plan.retry) == ("WaitingForModule", 1)
    assert "waits until KMM has loaded the module onload of version 8.1" in plan.steps[0].message
    assert not plan.overdue
    assert step(node, KEEPING, KEEPING.node_timeout) == ("RemovingGate", {"gate": None})


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
