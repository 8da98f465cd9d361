"""The steps of one node: their order, plugin pods of another revision, modules without KMM, release and deletion."""

from typing import Any

import msgspec
import pytest
from onloadcluster import Cluster, app_pod, plugin_pod, progress, working
from onloadsteps import NEW, NOW, OLD, TARGET, act, step, with_sfc

from accelplane.onload.node_steps import READY_WAIT
from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Target
from accelplane.onload.steps import decide


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
