"""The status of an Onload resource, and the values derived from its spec."""

from typing import Any

import msgspec
import pytest
from onloadcluster import Cluster, app_pod, progress, working
from onloadresources import onload
from onloadsteps import waited

from accelplane.kube.conditions import Condition
from accelplane.onload import validation
from accelplane.onload.children import Existing, desired_objects
from accelplane.onload.models import Revision, Status, seconds
from accelplane.onload.modules import KmmApi
from accelplane.onload.names import Names
from accelplane.onload.observed import BlockedEviction, NodeView
from accelplane.onload.plan import Problem, Target
from accelplane.onload.requirements import load_order_problems, max_unavailable, overlaps, problem_of, target_of
from accelplane.onload.resources import DaemonSetStatus, Node, Pod, concerns_onload, node_only, pod_only, relevant
from accelplane.onload.rollout import Rollout
from accelplane.onload.status import Observation, status
from accelplane.onload.steps import decide

NOW = "2026-01-02T03:04:05Z"
NEW, OLD = "8.2", "8.1"
TARGET = Target(version=NEW, revision="r")
REVISION = Revision(version=NEW, label=NEW, user_image="u", state="Verified")


def status_of(nodes: list[NodeView], target: Target = TARGET, seconds: float = 0, **more: Any) -> Status:
    plan = waited(seconds, *nodes, target=target)
    return status(onload(), Observation(target=target, plan=plan, nodes=nodes, **more), NOW)


def found(which: Status) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in which.conditions}


@pytest.mark.parametrize(
    ("nodes", "more", "expected"),
    [
        (
            [],
            {},
            {"Ready": ("True", "NoNodes"), "Progressing": ("False", "Complete"), "Degraded": ("False", "AsExpected")},
        ),
        ([working("a", NEW)], {}, {"Ready": ("True", "AllNodesReady"), "Progressing": ("False", "Complete")}),
        ([NodeView(name="a")], {}, {"Ready": ("False", "NodesNotReady"), "Progressing": ("True", "NodeUpgrading")}),
        (
            [NodeView(name="a", module_pods=1)],
            {},
            {"Progressing": ("True", "WaitingForModulePods")},
        ),
        (
            [working("a", OLD, gate=None, plugins=(), apps=(app_pod(),), progress=progress(NEW, upgrade=True))],
            {"blocking": [BlockedEviction("default/app")]},
            {"Progressing": ("True", "NodeUpgrading"), "Degraded": ("True", "EvictionBlocked")},
        ),
        (
            [working("a", OLD)],
            {"target": msgspec.structs.replace(TARGET, paused=True)},
            {"Ready": ("False", "NodesNotReady"), "Progressing": ("False", "Paused")},
        ),
        ([working("a", OLD, held=True)], {}, {"Progressing": ("False", "Held")}),
        (
            [working("a", NEW, plugins=(), progress=progress(NEW, upgrade=True))],
            {"target": msgspec.structs.replace(TARGET, node_timeout=1), "seconds": 1},
            {"Degraded": ("True", "NodeTimeout")},
        ),
        (
            [working("a", NEW)],
            {"rolled_back": "9"},
            {"Ready": ("False", "RolledBack"), "Degraded": ("True", "RolledBack")},
        ),
        (
            [working("a", NEW)],
            {"problems": [Problem("SelectorOverlap", "x")]},
            {"Degraded": ("True", "SelectorOverlap")},
        ),
    ],
)
def test_conditions_follow_from_the_state_of_nodes(
    nodes: list[NodeView], more: dict[str, Any], expected: dict[str, tuple[str, str]]
) -> None:
    assert expected.items() <= found(status_of(nodes, **more)).items()


def test_a_problem_without_a_plan_is_the_reason_of_all_devices() -> None:
    observed = Observation(target=TARGET, problems=[Problem("KmmMissing", "install KMM")])
    after = status(onload(), observed, NOW)
    assert found(after)["Ready"] == ("False", "KmmMissing")
    assert found(after)["Degraded"] == ("True", "KmmMissing")


def test_blocked_evictions_name_pods_and_budgets() -> None:
    blocking = [
        BlockedEviction("apps/b", "The disruption budget web needs 2 healthy pods and has 2 currently"),
        BlockedEviction("a/a"),
    ]
    after = status_of([working("a", OLD)], blocking=blocking)
    assert after.onload.blocking_pods == ("a/a", "apps/b")
    (degraded,) = (each for each in after.conditions if each.type == "Degraded")
    assert degraded.message == (
        "a PodDisruptionBudget does not allow the eviction of a/a, apps/b (The disruption budget web needs 2 healthy "
        "pods and has 2 currently); change the budget or delete the pods"
    )


def test_a_resource_in_deletion_is_not_ready() -> None:
    target = Target(version=NEW, deleting=True)
    after = status_of([working("a", NEW, selected=False)], target)
    assert found(after)["Ready"] == ("False", "Deleting")
    assert [each.name for each in after.onload.current_nodes] == ["a"]


def test_counts_of_nodes_and_pods() -> None:
    nodes = [
        working("a", NEW),
        working("b", OLD, gate=None, plugins=(), advertised=False, progress=progress(NEW, upgrade=True)),
        working("c", OLD, selected=False),
    ]
    after = status_of(nodes, daemonset=DaemonSetStatus(desired_number_scheduled=2, number_ready=1))
    counts = after.onload
    assert (counts.version, counts.nodes_matching, counts.nodes_labelled) == (NEW, 2, 1)
    assert (counts.nodes_module_ready, counts.nodes_upgraded) == (2, 1)
    assert [(each.name, each.step, each.since) for each in counts.current_nodes] == [
        ("b", "RemovingModule", "1970-01-01T00:16:40Z")
    ]
    assert (after.device_plugin.desired, after.device_plugin.ready) == (2, 1)


def test_empty_parts_are_written_because_the_definition_requires_them() -> None:
    written = msgspec.to_builtins(status_of([]))
    assert written["devicePlugin"] == {"desired": 0, "ready": 0}
    assert written["onload"]["currentNodes"] == ()


def test_nodes_without_a_report_of_kmm_are_reported() -> None:
    nodes = [working(name, NEW, module_loaded=False, module_loaded_version=None) for name in "abcde"]
    (ready, *_) = status_of(nodes).conditions
    assert ready.message == "5 of 5 nodes are verified; KMM reports no loaded modules on a, b, c and 2 more"


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    before = status_of([working("a", NEW)])
    resource = msgspec.structs.replace(onload(), status=before)
    plan = decide(TARGET, [working("a", OLD)], 1.0)
    after = status(resource, Observation(target=TARGET, plan=plan, nodes=[working("a", OLD)]), "later")
    times = {each.type: each.last_transition_time for each in after.conditions}
    assert times == {"Ready": "later", "Progressing": "later", "Degraded": NOW}
    assert all(isinstance(each, Condition) for each in after.conditions)


def test_a_progress_with_an_impossible_time_has_no_time() -> None:
    node = working("a", NEW, plugins=(), progress=progress(NEW, started=10**30))
    (current,) = status_of([node]).onload.current_nodes
    assert current.since == ""


# Requirements


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ({}, None),
        ({"selector": {}}, None),
        ({"onload__version": ""}, "InvalidVersion"),
        ({"onload__version": "a/b"}, "InvalidVersion"),
        ({"onload__version": "1" * 64}, "InvalidVersion"),
        ({"onload__kernelMappings": []}, "InvalidSpec"),
        ({"onload__kernelMappings": [], "onload__moduleManagement": "External"}, None),
        ({"devicePlugin__mountOnload": True}, "InvalidSpec"),
        ({"devicePlugin__mountOnload": True, "devicePlugin__preload": False}, None),
        ({"upgrade__evictionTimeout": "5"}, "InvalidSpec"),
        ({"upgrade__nodeTimeout": "1h30m"}, None),
        ({"upgrade__nodeTimeout": "0s"}, "InvalidSpec"),
        # Rules of admission without a reason: the operator realizes these.
        ({"devicePlugin__hostOnloadPath": "/usr"}, None),
        ({"devicePlugin__maxPodsPerNode": -1}, None),
    ],
)
def test_problems_of_a_spec_are_reported(paths: dict[str, Any], reason: str | None) -> None:
    resource = onload(**paths)
    problem = problem_of(resource)
    assert (problem and problem.reason) == reason
    if problem is not None:
        assert validation.verdict(resource).refusal == validation.PREFIX + problem.message


def test_problems_of_a_resource_name_are_reported() -> None:
    for name, reason in (("a.b", "InvalidName"), ("x" * 26, "NameTooLong")):
        problem = problem_of(onload(name))
        assert problem is not None
        assert problem.reason == reason
        found = validation.verdict(onload(name))
        assert problem.message in (found.refusal.removeprefix(validation.PREFIX), *found.warnings)


def test_nodes_whose_onload_may_use_the_sfc_of_the_kernel() -> None:
    target = Target(version=NEW, sfc=True)
    names = Names("default", "onload")
    wrong = working("a", NEW, sfc=True, sfc_loaded=False)
    (problem,) = load_order_problems(names, target, [wrong, working("b", NEW, sfc=True)])
    assert problem.reason == "SfcNotLoaded"
    assert problem.message.startswith("node a: KMM reports the module onload and not sfc")
    assert "kmm.node.kubernetes.io/version-module.default.onload-module" in problem.message
    assert "kmm.node.kubernetes.io/version-module.default.onload-sfcmod" in problem.message
    others = [
        msgspec.structs.replace(wrong, **change)
        for change in ({"ready": False}, {"selected": False}, {"gate": None}, {"sfc": OLD}, {"module_loaded": False})
    ]
    assert load_order_problems(names, target, others) == []
    assert load_order_problems(names, Target(version=NEW), [wrong]) == []
    assert load_order_problems(names, Target(version=NEW, sfc=True, kmm=False), [wrong]) == []


def test_removing_both_labels_loads_both_modules_in_their_order() -> None:
    """The remedy that the message of `load_order_problems` names."""
    cluster = Cluster([working("a", NEW, sfc=True, sfc_loaded=False)])
    cluster.change("a", module=None, sfc=None)
    steps: list[str] = []
    target = Target(version=NEW, sfc=True, revision="r")
    for _ in range(40):
        for action in cluster.decide(target).actions:
            steps.append(action.step)
            cluster.apply(action)
            if action.step == "LabellingModule":
                assert cluster.nodes["a"].sfc_loaded
        cluster.react("a")
        cluster.now += 5
    assert steps == ["RemovingGate", "LabellingSfc", "LabellingModule", "SettingGate", "Verified"]


@pytest.mark.parametrize(
    ("value", "nodes", "expected"),
    [
        (None, 9, 1),
        (3, 9, 3),
        (0, 9, 1),
        ("10%", 25, 3),
        ("100%", 4, 4),
        ("1%", 0, 1),
        ("x", 9, 1),
        ("-1", 9, 1),
        ("9" * 30, 9, 1),
    ],
)
def test_max_unavailable_is_a_number_or_a_percentage_of_nodes(
    value: int | str | None, nodes: int, expected: int
) -> None:
    assert max_unavailable(value, nodes) == expected


def test_the_upgrade_target_has_the_settings_of_the_resource() -> None:
    resource = onload(
        upgrade={
            "maxUnavailable": "50%",
            "paused": True,
            "nodeTimeout": "2m",
            "evictionTimeout": "30s",
            "verify": {"strict": True, "probe": {"image": "i"}},
        }
    )
    nodes = [NodeView(name=name) for name in "abcd"]
    objects = desired_objects(resource, NEW, "plugin:1", KmmApi(), Existing(None, None, None), keeps_selector=False)
    rollout = Rollout(desired=REVISION, target=REVISION)
    goal = target_of(resource, objects, nodes, rollout)
    assert (goal.max_unavailable, goal.paused, goal.node_timeout, goal.eviction_timeout) == (2, True, 120, 30)
    assert (goal.strict, goal.probe, goal.revision) == (True, True, objects.revision)
    back = msgspec.structs.replace(rollout, rolls_back=True)
    assert target_of(resource, objects, nodes, back).max_unavailable == 1


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("1h30m", 5400), ("1.5m", 90), ("100ms", 0.1), ("1us", 1e-6)]
)
def test_durations_are_parsed_as_in_go(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "-1s", "1 s", "m", "1d", "1m\n"])
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)


def test_overlaps_name_the_other_resource_and_the_nodes() -> None:
    nodes = {f"n{index}": {"node-role.kubernetes.io/worker": "", "zone": "a"} for index in range(5)}
    others = [onload(), onload("other", selector={"zone": "a"}), onload("far", selector={"zone": "b"})]
    (problem,) = overlaps(onload(), others, nodes)
    assert problem.message == "Onload default/other also selects nodes n0, n1, n2 and 2 more; change a selector"


# Projections


def test_a_heartbeat_changes_no_relevant_field_of_a_node() -> None:
    def node(**more: Any) -> Node:
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": more.pop("beat", "1")}
        body = {
            "metadata": {"name": "a", "resourceVersion": "1", "annotations": {"example.com/x": more.pop("x", "1")}},
            "status": {"conditions": [ready], "allocatable": {"cpu": "1", **more}},
        }
        result = msgspec.convert(body, Node)
        node_only(result)
        return result

    assert relevant(node()) == relevant(node(beat="2", x="2"))
    assert relevant(node()) != relevant(node(**{"amd.com/onload": "100"}))
    assert node().metadata.annotations == {}
    assert node().status.allocatable is None


@pytest.mark.parametrize(
    ("containers", "uses"),
    [
        ({"containers": [{"resources": {"requests": {"amd.com/onload": "1"}}}]}, True),
        ({"containers": [{}], "initContainers": [{"resources": {"requests": {"amd.com/onload": 2}}}]}, True),
        ({"containers": [{"resources": {"requests": {"amd.com/onload": "0"}}}]}, False),
        ({"containers": [{"resources": {}}, {"resources": {"requests": {"cpu": "1"}}}]}, False),
        ({}, False),
    ],
)
def test_pods_that_use_onload_are_detected(containers: dict[str, Any], uses: bool) -> None:
    pod = msgspec.convert({"metadata": {"name": "p", "labels": {"app": "x"}}, "spec": containers}, Pod)
    pod_only(pod)
    assert pod.uses_onload == concerns_onload(pod) == uses
    assert pod.metadata.labels is None


def test_history_is_part_of_the_status() -> None:
    nodes = [working("a", NEW), working("b", OLD, progress=progress(NEW, verified=OLD)), NodeView(name="c")]
    mapped = msgspec.structs.replace(REVISION, label=OLD, kernel_mappings=onload().spec.onload.kernel_mappings)
    after = status_of(nodes, history=(REVISION, mapped)).onload
    assert [(each.label, each.nodes) for each in after.history] == [(NEW, 1), (OLD, 1)]
    assert [(each.name, each.verified, each.target) for each in after.current_nodes] == [
        ("b", OLD, NEW),
        ("c", "", NEW),
    ]
