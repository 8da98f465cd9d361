"""Which taints, node selectors and affinities exclude nodes with enough devices for a waiting pod."""

from typing import Any

import msgspec
import pytest
from fleetscreens import I915, cluster, holder, node, text, unit

from accelplane.fleet.model import Node, Waiting
from accelplane.kube.kinds import PodSpec, Taint
from accelplane.kube.placement import obstacles

ML = Taint("dedicated", "ml", "NoSchedule")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod(**spec: Any) -> Waiting:
    return Waiting("team", "p", 5, {I915: 1}, "no message", spec=msgspec.convert(spec, PodSpec))


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def excluded(waiting: Waiting, found: Node) -> list[str]:
    facts = {"cordoned": found.cordoned, "ready": found.ready}
    return list(obstacles(waiting.spec, found.name, found.labels, found.taints, **facts))


def name_in(*names: str) -> dict[str, Any]:
    return {"matchFields": [{"key": "metadata.name", "operator": "In", "values": list(names)}]}


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"key": "dedicated", "value": "ml", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "operator": "Equal", "value": "ml"}, True),
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "value": "web"}, False),
        ({"key": "dedicated", "value": "ml", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_taint_excludes_a_node_unless_it_is_tolerated(toleration: dict[str, str], *, tolerated: bool) -> None:
    found = excluded(pod(tolerations=[toleration]), node("a", taints=(ML, Taint("soft", "", "PreferNoSchedule"))))
    assert found == ([] if tolerated else ["taint dedicated=ml (NoSchedule)"])


@pytest.mark.parametrize(
    ("terms", "matches"),
    [
        ([expression("zone", "In", "a", "b")], True),
        ([expression("zone", "In", "b")], False),
        ([expression("zone", "In", "b"), expression("zone", "Exists")], True),
        ([{**expression("zone", "In", "a"), **name_in("b")}], False),
        ([name_in("n")], True),
        ([expression("zone", "NotIn", "a")], False),
        ([expression("rack", "NotIn", "a")], True),
        ([expression("rack", "DoesNotExist")], True),
        ([expression("size", "Gt", "7")], True),
        ([expression("size", "Lt", "7")], False),
        ([expression("zone", "Gt", "7")], False),
        ([{}], False),
        ([], False),
    ],
)  # fmt: skip
def test_a_node_has_to_match_one_term_of_the_affinity(terms: list[dict[str, Any]], *, matches: bool) -> None:
    found = excluded(pod(affinity=affinity(*terms)), node("n", labels={"zone": "a", "size": "8"}))
    assert bool(found) is not matches


def test_each_obstacle_is_named_with_what_the_node_has() -> None:
    spec = pod(nodeSelector={"zone": "b"}, affinity=affinity(expression("rack", "In", "1", "2")))
    assert excluded(spec, node("a", taints=(ML,), cordoned=True, ready=False)) == [
        "cordoned",
        "not ready",
        "taint dedicated=ml (NoSchedule)",
        "node selector zone=b, the node has 'a'",
        "required node affinity rack In (1, 2), the node has no such label",
    ]
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    assert excluded(pod(tolerations=tolerations), node("a", cordoned=True)) == []


def test_waiting_pods_name_what_excludes_each_node_with_enough_free_devices() -> None:
    nodes = (
        node("full", unit(holders=(holder(number=2),)), taints=(ML,)),
        node("tainted-1", unit(), taints=(ML,)),
        node("tainted-2", unit(), taints=(ML,)),
        node("cordoned", unit(), cordoned=True),
        node("open", unit(), labels={"zone": "b"}),
        node("other-place", unit()),
    )
    found = cluster(*nodes, waiting=(pod(nodeSelector={"zone": "b"}),))
    output = text("waiting", found)
    for expected in (
        "Enough is free on tainted-1, tainted-2, excluded by taint dedicated=ml (NoSchedule); node selector zone=b,",
        "Enough is free on cordoned, excluded by cordoned; node selector zone=b, the node has 'a'.",
        "Enough is free on other-place, excluded by node selector zone=b, the node has 'a'.",
        "No taint, node selector or node affinity excludes open: see the message of the scheduler.",
    ):
        assert expected in output
    assert "full" not in output
    hidden = text("waiting", found, visible=lambda _space: False)
    assert "excluded by a rule for nodes." in hidden
    assert "zone" not in hidden
