"""Numbers of a snapshot: overview, shortages, use of namespaces, device seconds."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fleet.arithmetic import (
    Overview,
    Supply,
    candidates,
    explain,
    namespaces,
    overview,
    shortages,
    supplies,
)
from accelplane.fleet.families import FAMILIES, family_of, is_known
from accelplane.fleet.model import Agent, Cluster, Node, NodeResource, Quota, Waiting
from accelplane.fleet.usage import Usage
from accelplane.report.inventory import Holder, ReportedUnit

I915 = "gpu.intel.com/i915"
QAT = "qat.intel.com/generic"
CONNECTED = Agent("ns/agent", "accelplane node", "1", "connected")


def holder(namespace: str = "a", count: int = 1, resource: str = I915) -> Holder:
    return Holder(namespace, "p", "c", resource, count)


def unit(name: str = "card0", ids: int = 1, *holders: Holder, **options: Any) -> ReportedUnit:
    return ReportedUnit("gpu", name, ids={I915: ids}, holders=holders, **options)


def node(name: str, ids: int, allocated: int = 0, *units: ReportedUnit, **options: Any) -> Node:
    stage, unhealthy = options.pop("stage", "registered"), options.pop("unhealthy", 0)
    resource = NodeResource(
        I915,
        capacity=ids,
        allocatable=ids - unhealthy,
        ids=ids,
        healthy=ids - unhealthy,
        allocated=allocated,
        stage=stage,
    )
    return Node(name, agents=(CONNECTED,), resources=(resource,), units=units, **options)


def bare(name: str, capacity: int, allocatable: int, *holders: Holder, resource: str = I915) -> Node:
    return Node(name, resources=(NodeResource(resource, capacity=capacity, allocatable=allocatable),), holders=holders)


def cluster(*nodes: Node, **options: Any) -> Cluster:
    return Cluster(1, 100.0, 0.0, {node.name: node for node in nodes}, **options)


def test_the_overview_counts_ids_by_nodes_and_health_by_units() -> None:
    units = (
        unit("card0", 2, holder(), phase="unhealthy"),
        unit("card1", 2, holder(count=2), idle_since=5.0),
        unit("card2", 2, known=False, phase="recovering"),
        unit("card3", 0, known=False),
    )
    assert overview(cluster(node("n1", 6, 3, *units, unhealthy=2), bare("n2", 4, 3))) == (
        Overview(
            "gpu", I915, nodes=2, units=4, ids=10, allocated=3, free=4, unhealthy=2, affected=1, unknown=1, idle=1,
            estimated=1,
        ),
    )  # fmt: skip


def test_problems_come_first_in_the_overview() -> None:
    resources = [f"{family}.intel.com/x" for family in ("dlb", "dsa", "iaa", "npu")]
    nodes = [bare(name, 1, 1, resource=name) for name in resources]
    allocated = ReportedUnit(
        "npu", "accel0", phase="unhealthy", ids={resources[3]: 1}, holders=(holder(resource=resources[3]),)
    )
    free = ReportedUnit("iaa", "wq0", phase="unhealthy", ids={resources[2]: 1})
    units = Node("n", units=(allocated, free))
    assert [row.family for row in overview(cluster(*nodes, units))] == ["npu", "iaa", "dlb", "dsa"]


def test_nodes_whose_agent_does_not_answer_or_is_not_registered_are_a_problem() -> None:
    stale = Agent("ns/agent", "", "", "stale")
    (row,) = overview(
        cluster(node("n1", 1, stage="waiting"), Node("n2", agents=(stale,), resources=(NodeResource(I915),)))
    )
    assert (row.unregistered, row.unanswered, row.has_problem) == (1, 1, True)


def test_supply_is_free_only_on_nodes_that_accept_pods() -> None:
    nodes = (
        node("n1", 4, 3),
        node("n2", 8, 5, unhealthy=1),
        node("n3", 2, cordoned=True),
        node("n4", 3, ready=False),
        node("n5", 5, stage="waiting"),
        bare("n6", 1, 0),
    )
    assert supplies(cluster(*nodes))[I915] == Supply(
        free=3, most_free=2, most_free_node="n2", allocated=8, unhealthy=2, cordoned=2, unready=3, unregistered=5,
        estimated=1, free_by_node={"n1": 1, "n2": 2}, closed_by_node={"n3": 2, "n4": 3},
    )  # fmt: skip


def test_a_shortage_has_the_numbers_of_the_cluster_and_of_the_strictest_quota() -> None:
    waiting = (
        Waiting("b", "young", 9.0, {I915: 2}),
        Waiting("a", "old", 5.0, {QAT: 1, I915: 2}),
    )
    quotas = (Quota("a", "q1", I915, 8, 7), Quota("a", "q2", I915, 4, 1), Quota("a", "q3", QAT, 1, 3))
    found = shortages(cluster(node("n1", 1), node("n2", 1), waiting=waiting, quotas=quotas))
    assert [(each.pod, each.resource, each.requested, each.quota_left, each.fits) for each in found] == [
        ("old", I915, 2, 1, False),
        ("old", QAT, 1, 0, False),
        ("young", I915, 2, None, False),
    ]
    assert explain(found[0]) == (
        "Requests 2 of gpu.intel.com/i915. 2 free in the cluster, at most 1 on one node, on n1. "
        "The quota of the namespace leaves 1 for other pods."
    )
    assert explain(found[1]) == (
        "Requests 1 of qat.intel.com/generic. No node has any. The quota of the namespace leaves 0 for other pods."
    )


def test_an_explanation_lists_unusable_and_unknown_properties() -> None:
    nodes = (node("n1", 4, unhealthy=1, cordoned=True), bare("n2", 2, 2))
    (found,) = shortages(cluster(*nodes, waiting=(Waiting("a", "p", 1.0, {I915: 2}),)))
    assert explain(found) == (
        "Requests 2 of gpu.intel.com/i915. 2 free in the cluster, at most 2 on one node, on n2. "
        "Not usable: 1 unhealthy, 3 on cordoned nodes. The allocation is not known on 1 node. "
        "Enough may be free on a node whose allocation is not known."
    )


def test_an_explanation_does_not_deny_what_only_unregistered_agents_have() -> None:
    found = Node("n1", resources=(NodeResource(I915, ids=4, healthy=4, stage="waiting"),))
    (shortage,) = shortages(cluster(found, waiting=(Waiting("a", "p", 1.0, {I915: 2}),)))
    assert explain(shortage) == (
        "Requests 2 of gpu.intel.com/i915. 0 free in the cluster, at most 0 on one node. "
        "Not usable: 4 on nodes whose agent is not registered."
    )


def test_a_pod_that_exists_does_not_wait_for_its_quota() -> None:
    found = cluster(node("n1", 2), waiting=(Waiting("a", "p", 1.0, {I915: 2}),), quotas=(Quota("a", "q", I915, 2, 2),))
    (shortage,) = shortages(found)
    assert explain(shortage) == (
        "Requests 2 of gpu.intel.com/i915. 2 free in the cluster, at most 2 on one node, on n1. "
        "The quota of the namespace leaves 0 for other pods. "
        "Enough is free on one node: the pod waits for something else."
    )


@pytest.mark.parametrize(("devices_of_qat", "together"), [("n2", False), ("n1", True)])
def test_resources_that_are_free_on_different_nodes_only_do_not_fit_together(
    devices_of_qat: str, *, together: bool
) -> None:
    gpu = node("n1", 2)
    qat = NodeResource(QAT, capacity=4, allocatable=4, ids=4, healthy=4, stage="registered")
    resources = (*gpu.resources, qat) if devices_of_qat == "n1" else gpu.resources
    nodes = (msgspec.structs.replace(gpu, resources=resources), Node("n2", agents=(CONNECTED,), resources=(qat,)))
    causes = shortages(cluster(*nodes, waiting=(Waiting("a", "p", 1.0, {I915: 2, QAT: 1}),)))
    assert [each.fits for each in causes] == [True, True]
    assert bool(candidates(causes, closed=False)) is together
    last = "the pod waits for something else." if together else "but no node has enough of all requested resources."
    assert [explain(each, together=together).endswith(last) for each in causes] == [True, True]


def test_namespaces_have_ids_share_idle_ids_and_device_hours() -> None:
    units = (unit("card0", 8, holder("a", 2), holder("b", 4), idle_since=3.0), unit("card1", 8, holder("a", 8)))
    snapshot = cluster(node("n1", 16, 14, *units), held_seconds={("a", I915): 3600.0, ("gone", I915): 1800.0})
    found = {each.namespace: each for each in namespaces(snapshot, 100.0 + 3600)}
    assert (found["a"].ids, found["a"].share, found["a"].idle) == (10, 10 / 16, 2)
    assert found["a"].device_hours == pytest.approx(1 + 1.25)
    assert (found["b"].ids, found["b"].idle, found["b"].device_hours) == (4, 4, 0.5)
    assert (found["gone"].ids, found["gone"].share, found["gone"].device_hours) == (0, 0, 0.5)


def test_device_seconds_follow_the_holders_and_survive_a_clock_that_is_set_back() -> None:
    usage, allocated, free = Usage(0.0), node("n", 2, 1, unit("card0", 2, holder())), node("n", 2, 0, unit("card0", 2))
    usage.update({}, {"n": allocated}, 10.0)
    usage.update({"n": allocated}, {"n": free}, 30.0)
    usage.update({"n": free}, {"n": allocated}, 20.0)
    usage.update({"n": allocated}, {}, 40.0)
    assert usage.seconds(1000.0) == {("a", I915): 20.0}


@pytest.mark.parametrize(
    ("resource", "family"),
    [("gpu.intel.com/xe", "gpu"), ("amd.com/onload", "onload"), ("sgx.intel.com/epc", "sgx"), ("x.org/y", "x.org")],
)
def test_resources_have_families(resource: str, family: str) -> None:
    assert family_of(resource) == family
    assert is_known(resource) == (family in FAMILIES)
    assert is_known(resource, ("x.org/",))


@pytest.mark.parametrize("resource", ["amd.com/gpu", "cpu", "intel.com/gpu", "hugepages-1Gi"])
def test_resources_of_others_are_not_known(resource: str) -> None:
    assert not is_known(resource)


NODES = st.builds(
    lambda name, ids, allocated, unhealthy, cordoned, ready, stage: node(
        name, ids, allocated, cordoned=cordoned, ready=ready, stage=stage, unhealthy=min(ids, unhealthy)
    ),
    st.sampled_from("abcdef"),
    *(st.integers(0, 9) for _ in range(3)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["registered", "waiting"]),
)


@given(st.lists(NODES, max_size=6))
def test_each_free_id_is_counted_once_in_supplies(nodes: list[Node]) -> None:
    snapshot = cluster(*nodes)
    total = sum(row.free for row in overview(snapshot))
    supply = supplies(snapshot).get(I915, Supply())
    assert supply.free + supply.cordoned + supply.unready + supply.unregistered == total
    assert 0 <= supply.most_free <= supply.free
