"""The list of devices that the fleet serves: from a snapshot, with names that a viewer may see, and decoded."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fleet.devicelist import FleetDeviceList, decode, device_list
from accelplane.fleet.model import Agent, Cluster, DevicePlugin, Node
from accelplane.report.inventory import Holder, ReportedUnit

UNIT = ReportedUnit(
    plugin="gpu",
    unit="card0",
    device="card0",
    bdf="0000:03:00.0",
    model="Flex 170",
    numa=1,
    phase="unhealthy",
    reason="memory",
    text="memory not ok",
    since=100.0,
    ids={"gpu.intel.com/i915": 2},
    holders=(Holder("research", "train", "main", "gpu.intel.com/i915", 1, 90.0),),
)


def cluster(*nodes: Node) -> Cluster:
    return Cluster(7, 1000.0, 1.0, {node.name: node for node in nodes})


def node(
    name: str, *units: ReportedUnit, agents: tuple[Agent, ...] = (Agent("agent", "agent", "1", "connected"),)
) -> Node:
    return Node(name, agents=agents, units=units)


def test_a_device_has_its_state_its_holders_and_times() -> None:
    listed = device_list(cluster(node("b", UNIT), node("a")), lambda _namespace: True)
    (device,) = listed.devices
    assert (device.node, device.plugin, device.device, device.bdf) == ("b", "gpu", "card0", "0000:03:00.0")
    assert (device.state, device.reason, device.state_since, device.current) == ("unhealthy", "memory", 100.0, True)
    (holder,) = device.holders
    assert (holder.namespace, holder.pod, holder.container, holder.since) == ("research", "train", "main", 90.0)
    assert (listed.generation, listed.problems) == (7, ())


def test_a_device_whose_health_is_not_known_keeps_a_state_that_needs_attention() -> None:
    units = (
        msgspec.structs.replace(UNIT, unit="a", known=False, phase="unhealthy"),
        msgspec.structs.replace(UNIT, unit="b", known=False, phase="healthy"),
    )
    listed = device_list(cluster(node("n", *units)), lambda _namespace: True)
    assert [device.state for device in listed.devices] == ["unhealthy", "unknown"]


def test_the_list_of_all_nodes_has_the_device_plugins_of_the_operator() -> None:
    plugin = DevicePlugin("GpuDevicePlugin", "gpu", 3, 2, 3, "1 of 3 pods is not ready")
    found = msgspec.structs.replace(cluster(node("a", UNIT)), device_plugins=(plugin,), more_device_plugins=4)
    listed = decode(msgspec.json.encode(device_list(found, lambda _namespace: True)))
    (item,) = listed.device_plugins
    assert (item.kind, item.name, item.desired, item.ready, item.nodes) == ("GpuDevicePlugin", "gpu", 3, 2, 3)
    assert (item.problem, listed.more_device_plugins) == ("1 of 3 pods is not ready", 4)
    assert b'"resourceKind":"GpuDevicePlugin"' in msgspec.json.encode(listed)
    assert device_list(found, lambda _namespace: True, node="a").device_plugins == ()


def test_names_in_namespaces_that_a_viewer_may_not_see_are_hidden() -> None:
    (device,) = device_list(cluster(node("a", UNIT)), lambda namespace: namespace != "research").devices
    (holder,) = device.holders
    assert (holder.namespace, holder.pod, holder.container, holder.count) == ("hidden", "hidden", "hidden", 1)


def test_nodes_without_a_connected_agent_are_reported() -> None:
    stale = Agent("agent-1", "agent", "1", "stale", "no answer")
    listed = device_list(cluster(node("a", agents=()), node("b", UNIT, agents=(stale,))), lambda _namespace: True)
    assert [(each.node, each.problem) for each in listed.problems] == [
        ("a", "no agent with pages"),
        ("b", "agent agent-1: stale: no answer"),
    ]
    assert not listed.devices[0].current


def test_one_node_can_be_selected() -> None:
    listed = device_list(cluster(node("a", UNIT), node("b", UNIT)), lambda _namespace: True, node="b")
    assert [device.node for device in listed.devices] == ["b"]


def test_a_list_is_decoded_as_it_was_encoded() -> None:
    listed = device_list(cluster(node("a", UNIT)), lambda _namespace: True)
    content = msgspec.json.encode(listed)
    assert decode(content) == listed
    assert msgspec.json.decode(content)["devices"][0]["stateSince"] == 100.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b'{"apiVersion": "v1", "kind": "List"}',
        b'{"devices": [{"node": "a"}]}',
        b'{"devices": [{"node": "a", "plugin": "p", "unit": "u", "state": "ill"}]}',
        b'{"devices": [{"node": "a", "plugin": "p", "unit": "u", "ids": {"r": -1}}]}',
        b"[" * 100_000,
    ],
)
def test_other_responses_are_not_a_list(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a list of devices"):
        decode(content)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_list_or_rejected(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decode(content), FleetDeviceList)
