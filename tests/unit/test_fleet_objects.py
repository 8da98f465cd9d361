"""Fields that the fleet reads from nodes, pods and quotas, and the composition of a node."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fleet.agents import Place, Report
from accelplane.fleet.compose import compose
from accelplane.fleet.families import is_known
from accelplane.fleet.model import AgentState, NodeResource, Quota
from accelplane.fleet.objects import (
    NodeFacts,
    ResourceQuota,
    agent_place,
    holders_of,
    node_facts,
    quotas_of,
    relevant_node,
    relevant_pod,
    waiting_pod,
)
from accelplane.kube.kinds import NO_SPEC, NO_STATUS, Node, Pod, pod_requests
from accelplane.report.inventory import (
    AdvertisedResource,
    Holder,
    NodeInventory,
    PluginInventory,
    ReportedUnit,
    SkippedHardware,
)

I915 = "gpu.intel.com/i915"


def container(count: object, **options: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {I915: count, "cpu": "1"}}} | options


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **options: Any) -> Pod:
    document = {
        "metadata": {"name": "p", "namespace": "a", "creationTimestamp": "2026-01-01T00:00:00Z"}
        | options.pop("meta", {}),
        "spec": {"containers": containers, "initContainers": init} | options.pop("spec", {}),
        "status": options,
    }
    return msgspec.convert(document, Pod)


def test_a_pending_pod_has_its_message_and_scheduling_gates() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    thing = pod(container(1), spec={"schedulingGates": [{"name": "x.org/gate"}]}, conditions=[condition])
    found = waiting_pod(thing, is_known)
    assert found is not None
    assert (found.message, found.gates, found.since) == ("0/1 nodes", ("x.org/gate",), 1767225600.0)


def test_a_pod_with_many_scheduling_gates_shows_some_and_their_number() -> None:
    gates = [{"name": f"x.org/{number}"} for number in range(1000)]
    found = waiting_pod(pod(container(1), spec={"schedulingGates": gates}), is_known)
    assert found is not None
    assert (len(found.gates), found.gates[0], found.gates[-1]) == (17, "x.org/0", "984 more")


def test_pods_without_our_resources_and_finished_pods_do_not_wait() -> None:
    assert waiting_pod(pod({"name": "c"}), is_known) is None
    assert waiting_pod(pod(container(1), meta={"deletionTimestamp": "2026-01-01T00:00:00Z"}), is_known) is None


def test_the_cache_stores_no_fields_of_pods_without_our_resources() -> None:
    other, own = pod({"name": "c"}, spec={"nodeName": "n"}), pod(container(1), meta={"labels": {"a": "b"}})
    for thing in (other, own):
        relevant_pod(is_known)(thing)
    assert (other.spec, other.status) == (NO_SPEC, NO_STATUS)
    assert own.metadata.labels is None
    assert pod_requests(own.spec, is_known) == {I915: 1}


def test_a_pod_holds_what_the_scheduler_reserves_until_it_ends() -> None:
    init = (container(4), container(1, name="side", restartPolicy="Always"))
    options: dict[str, Any] = {"init": init, "spec": {"nodeName": "n"}, "startTime": "2026-01-01T00:00:00Z"}
    assert list(holders_of(pod(container(2), **options), is_known)) == [Holder("a", "p", "", I915, 4, 1767225600.0)]
    assert list(holders_of(pod(container(2), phase="Succeeded", **options), is_known)) == []


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"podIP": "10.0.0.1"}, Place("a", "p", "n", "10.0.0.1", 9400)),
        ({}, Place("a", "p", "n", "", 9400)),
        ({"phase": "Failed"}, None),
        ({"meta": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, None),
        ({"spec": {"nodeName": ""}}, None),
    ],
)
def test_an_agent_serves_at_the_port_named_pages(options: dict[str, Any], place: Place | None) -> None:
    ports = [{"name": "other", "containerPort": 1}, {"name": "pages", "containerPort": 9400}]
    spec = {"nodeName": "n"} | options.pop("spec", {})
    assert agent_place(pod({"name": "c", "ports": ports}, spec=spec, **options)) == place


@pytest.mark.parametrize(
    ("address", "usable"),
    [
        ("10.0.0.1", True), ("fd00::1", True), ("240.0.0.1", True), ("192.168.1.1", True),
        ("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("::ffff:127.0.0.1", False),
        ("169.254.169.254", False), ("fe80::1", False), ("fe80::1%eth0", False), ("::ffff:169.254.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 - not bound
        ("::", False), ("224.0.0.1", False), ("ff02::1", False), ("api.example", False),
    ],
)  # fmt: skip
def test_an_agent_is_reached_at_addresses_of_the_network_only(address: str, usable: bool) -> None:
    ports = [{"name": "pages", "containerPort": 9400}]
    found = agent_place(pod({"name": "c", "ports": ports}, spec={"nodeName": "n"}, podIP=address))
    assert found is not None
    assert (bool(found.host), bool(found.problem)) == (usable, not usable)


def test_an_out_of_range_port_is_none() -> None:
    found = agent_place(
        pod({"name": "c", "ports": [{"name": "pages", "containerPort": 70_000}]}, spec={"nodeName": "n"})
    )
    assert found is not None
    assert found.port == 0


def test_the_cache_keeps_the_labels_readiness_and_known_resources_of_a_node() -> None:
    numbers = {I915: "2", "cpu": "8", "qat.intel.com/generic": "0"}
    ready = {"type": "Ready", "status": "True", "message": "x"}
    thing = msgspec.convert(
        {
            "metadata": {"name": "n", "labels": {"a": "b"}},
            "spec": {"unschedulable": True},
            "status": {
                "capacity": numbers,
                "allocatable": numbers,
                "conditions": [{"type": "X", "status": "True"}, ready],
            },
        },
        Node,
    )
    relevant_node(is_known)(thing)
    assert thing.status
    assert thing.status.capacity == {I915: "2", "qat.intel.com/generic": "0"}
    assert [each.type for each in thing.status.conditions or ()] == ["Ready"]
    resources = (NodeResource(I915, capacity=2, allocatable=2), NodeResource("qat.intel.com/generic"))
    assert node_facts(thing, is_known) == NodeFacts({"a": "b"}, True, True, resources)


def test_a_node_without_status_is_not_ready() -> None:
    thing = msgspec.convert({"metadata": {"name": "n"}}, Node)
    relevant_node(is_known)(thing)
    assert node_facts(thing, is_known) == NodeFacts({}, False, False, ())


def test_quotas_of_other_resources_are_ignored() -> None:
    status = {"hard": {f"requests.{I915}": "4", "requests.cpu": "1", "pods": "3"}, "used": {f"requests.{I915}": "1"}}
    quota = msgspec.convert({"metadata": {"name": "q", "namespace": "a"}, "status": status}, ResourceQuota)
    assert list(quotas_of(quota, is_known)) == [Quota("a", "q", I915, 4, 1)]


@given(st.text(max_size=30), st.sampled_from(["creationTimestamp", "quantity"]))
def test_any_time_and_any_quantity_are_read(text: str, field: str) -> None:
    if field == "quantity":
        assert all(count > 0 for count in pod_requests(pod(container(text)).spec, is_known).values())
    else:
        found = waiting_pod(pod(container(1), meta={"creationTimestamp": text}), is_known)
        assert found is not None


def report(pod: str, state: AgentState, answered: float, *plugins: str) -> Report:
    inventories = tuple(
        PluginInventory(
            plugin,
            (AdvertisedResource(f"{plugin}.intel.com/x", "registered", ids=1),),
            (ReportedUnit(plugin, f"{plugin}-{pod}"),),
            (SkippedHardware(plugin, pod, "x"),),
        )
        for plugin in plugins
    )
    inventory = NodeInventory(1, "n", "agent", {}, "1", inventories)
    return Report(Place("ns", pod, "n"), state, "", answered, inventory)


def test_the_responding_of_two_agents_with_the_same_plugin_is_used() -> None:
    reports = [report("old", "stale", 9, "gpu", "npu"), report("new", "connected", 5, "gpu", "qat")]
    found = compose("n", None, reports, (Holder("a", "p", "c", I915, 1),))
    assert found is not None
    assert [each.unit for each in found.units] == ["gpu-new", "qat-new", "npu-old"]
    assert [each.subject for each in found.skipped] == ["new", "new", "old"]
    assert [each.name for each in found.resources] == ["gpu.intel.com/x", "npu.intel.com/x", "qat.intel.com/x"]
    assert [each.pod for each in found.agents] == ["ns/new", "ns/old"]
    assert found.holders == ()


def test_a_node_without_resources_and_agents_is_not_part_of_the_fleet() -> None:
    facts = NodeFacts({}, True, False, ())
    assert compose("n", facts, [], ()) is None
    assert compose("n", None, [], ()) is None
    assert compose("n", facts, [Report(Place("ns", "p", "n"), "none")], ()) is not None


def test_rules_for_nodes_are_kept_for_waiting_pods_and_removed_from_assigned_ones() -> None:
    rules = {"nodeSelector": {"zone": "a"}, "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity": {}}}
    waiting, assigned = pod(container(1), spec=rules), pod(container(1), spec={**rules, "nodeName": "n"})
    for each in (waiting, assigned):
        relevant_pod(is_known)(each)
    found = waiting_pod(waiting, is_known)
    assert found is not None
    assert (found.spec.nodeSelector, len(found.spec.tolerations or ())) == ({"zone": "a"}, 1)
    assert (assigned.spec.nodeName, assigned.spec.nodeSelector, assigned.spec.affinity) == ("n", None, None)
    node = msgspec.convert(
        {"metadata": {"name": "n"}, "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}, Node
    )
    relevant_node(is_known)(node)
    assert [each.key for each in node_facts(node, is_known).taints] == ["k"]
