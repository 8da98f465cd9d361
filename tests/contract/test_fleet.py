"""The fleet against the double of the API server and doubles of agents over real sockets."""

import asyncio
import gzip
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from cluster.pki import Authority
from fleetagents import I915, AgentDouble, node, pod, response, unit
from kubeapi import KubeApi, kube_api
from prometheus_client import generate_latest
from waiting import until

from accelplane.apiserver import ApiError
from accelplane.fleet.agents import AgentTimes
from accelplane.fleet.arithmetic import namespaces, overview, shortages
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.model import Agent, DevicePlugin, Holder, Node
from accelplane.fleet.options import FleetOptions
from accelplane.fleet.view import FleetView
from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts

HASTE = WatchTimeouts(idle=5, duration=60, first_delay=0.01, max_delay=0.1)
TIMES = AgentTimes(wait=30, answer=0.5, first_delay=0.02, max_delay=0.1, min_interval=0.01, poll=0.05, check=0.1)


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with kube_api() as server:
        yield server


@asynccontextmanager
async def fleet_of(
    api: KubeApi, options: FleetOptions | None = None, times: AgentTimes = TIMES, client: Client | None = None
) -> AsyncIterator[Fleet]:
    client = client or Client(api.config, field_manager="test", timeout=1)
    fleet = Fleet(client, options or FleetOptions(), agent_times=times, watch_timeouts=HASTE, unserved_retry=0.05)
    running = asyncio.create_task(fleet.run())
    try:
        yield fleet
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


@asynccontextmanager
async def agents_of(api: KubeApi, *names: str) -> AsyncIterator[list[AgentDouble]]:
    """Nodes with agents."""
    async with AsyncExitStack() as stack:
        doubles = [await stack.enter_async_context(AgentDouble(name).serving()) for name in names]
        for double in doubles:
            api.put("nodes", node(double.node))
            api.put("pods", double.pod())
        yield doubles


def state(fleet: FleetView, name: str) -> str:
    found = fleet.cluster().nodes.get(name)
    return found.agents[0].state if found is not None and found.agents else ""


async def node_with(fleet: FleetView, name: str, condition: Callable[[Node], bool]) -> Node:
    """The node as soon as the condition holds."""

    def holds() -> bool:
        found = fleet.cluster().nodes.get(name)
        return found is not None and condition(found)

    await until(holds)
    return fleet.cluster().nodes[name]


async def connected(fleet: FleetView, *names: str) -> None:
    await until(lambda: all(state(fleet, name) == "connected" for name in names))


async def test_nodes_with_and_without_an_agent_are_shown(api: KubeApi) -> None:
    api.put("nodes", node("bare", 3))
    api.put("nodes", {"metadata": {"name": "other"}, "status": {"capacity": {"cpu": "8"}}})
    async with agents_of(api, "n1"), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        bare = await node_with(fleet, "bare", lambda found: True)
        found = fleet.cluster().nodes["n1"]
        assert set(fleet.cluster().nodes) == {"n1", "bare"}
        assert fleet.synced
    assert [each.unit for each in found.units] == ["card0", "card1"]
    (agent,) = found.agents
    assert (agent.pod, agent.name, agent.version) == ("accelplane/agent-n1", "accelplane node", "1.0.0")
    (resource,) = found.resources
    assert (resource.capacity, resource.ids, resource.stage) == (2, 2, "registered")
    assert (bare.agents, bare.units, bare.ready, bare.labels) == ((), (), True, {"zone": "a"})
    assert [(each.name, each.capacity, each.stage) for each in bare.resources] == [(I915, 3, "")]


async def test_a_change_of_an_agent_updates_the_snapshot_and_notifies_all_waiters(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        generation = fleet.cluster().generation
        waiting = [asyncio.create_task(fleet.changed(generation)) for _ in range(3)]
        agent.units = [unit("card0", "unhealthy", ("team/p",), reason="temperature")]
        agent.change()
        found = await node_with(fleet, "n1", lambda found: found.units[0].phase == "unhealthy")
        assert await asyncio.gather(*waiting) == [generation + 1] * 3
        assert found.units[0].holders == (Holder("team", "p", "c", I915, 1, 5),)
        assert await fleet.changed(0) == fleet.cluster().generation
        assert 'If-None-Match: "1-1"' in agent.requests[1]
        assert "GET /api/v1/inventory?wait=30 " in agent.requests[1]


async def test_an_unchanged_inventory_makes_no_new_snapshot(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        generation = fleet.cluster().generation
        agent.answer = lambda _head: b"HTTP/1.1 304 Not Modified\r\n\r\n"
        agent.abort()
        agent.change()
        await until(lambda: len(agent.requests) > 4)
        assert (state(fleet, "n1"), fleet.cluster().generation) == ("connected", generation)


def invalid_agent(body: bytes, **options: str) -> Callable[[str], bytes]:
    return lambda _head: response(body, **options)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (invalid_agent(b"<html>"), "inventory: JSON is malformed"),
        (invalid_agent(b" " * 3 * 1024 * 1024), "found 3145728 bytes, expected at most 2097152"),
        (
            lambda _head: b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 3 * 1024 * 1024,
            "found a body of more than 2097152 bytes",
        ),
        (
            invalid_agent(b"", status="302 Found", fields="Location: http://127.0.0.1:1/\r\n"),
            "found status 302 'Found'",
        ),
        (
            invalid_agent(gzip.compress(b" " * 10_000_000), fields="Content-Encoding: gzip\r\n"),
            "found content-encoding 'gzip', expected none",
        ),
        (lambda _head: b"SSH-2.0-x\r\n\r\n", "expected a status line"),
        (
            invalid_agent(msgspec.json.encode(AgentDouble("n2").document)),
            "found the inventory of node 'n2', expected 'n1'",
        ),
    ],
    ids=["junk", "large", "endless", "redirect", "gzip bomb", "other protocol", "other node"],
)
async def test_only_an_agent_with_an_invalid_response_is_marked(
    api: KubeApi, answer: Callable[[str], bytes], problem: str
) -> None:
    async with agents_of(api, "n1", "good") as (bad, good), fleet_of(api) as fleet:
        bad.answer = answer
        await connected(fleet, "good")
        found = await node_with(fleet, "n1", lambda found: found.agents[0].state == "invalid")
        assert problem in found.agents[0].problem
        assert found.resources[0].capacity == 2
        good.units = good.units[:1]
        good.change()
        await node_with(fleet, "good", lambda found: len(found.units) == 1)
        bad.answer = None
        await connected(fleet, "n1")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda _head: None, "no complete answer within 0.5 s"),
        (lambda _head: b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "no complete answer within 0.5 s"),
        (
            invalid_agent(b"", status="403 Forbidden"),
            "found status 403 'Forbidden', expected 200; grant it accelplane-inv",
        ),
        (invalid_agent(b"", status="503 Busy"), "found status 503 'Busy', expected 200"),
    ],
    ids=["silent", "incomplete", "forbidden", "busy"],
)
async def test_an_agent_that_does_not_answer_is_shown_with_its_last_inventory(
    api: KubeApi, answer: Callable[[str], bytes | None], problem: str
) -> None:
    times = msgspec.structs.replace(TIMES, wait=1)
    async with agents_of(api, "n1") as (agent,), fleet_of(api, times=times) as fleet:
        await connected(fleet, "n1")
        agent.answer = answer
        agent.abort()
        found = await node_with(fleet, "n1", lambda found: problem in found.agents[0].problem)
        assert found.agents[0].state == "stale"
        assert len(found.units) == 2
        assert found.agents[0].answered > 0
        agent.answer = None
        agent.abort()
        await connected(fleet, "n1")


async def test_an_inventory_is_dropped_when_its_agent_has_not_answered_for_long(api: KubeApi) -> None:
    times = msgspec.structs.replace(TIMES, expiry=0.5)
    async with agents_of(api, "n1") as (agent,), fleet_of(api, times=times) as fleet:
        await connected(fleet, "n1")
        agent.answer = invalid_agent(b"", status="503 Busy")
        agent.abort()
        found = await node_with(fleet, "n1", lambda found: not found.units)
        assert found.agents[0].state == "stale"
        assert [(each.capacity, each.ids) for each in found.resources] == [(2, 0)]


async def test_an_agent_that_never_answered_is_connecting(api: KubeApi) -> None:
    double = AgentDouble("n1")
    async with double.serving():
        pass  # nothing listens at its port any more
    api.put("pods", double.pod())
    async with fleet_of(api) as fleet:
        found = await node_with(fleet, "n1", lambda found: "Connection refused" in found.agents[0].problem)
        assert found.agents[0].state == "connecting"
        assert not found.ready


async def test_an_agent_without_pages_is_shown_with_the_option_to_set(api: KubeApi) -> None:
    double = AgentDouble("n1")
    api.put("pods", double.pod() | {"spec": {"nodeName": "n1", "containers": [{"name": "agent"}]}})
    async with fleet_of(api) as fleet:
        found = await node_with(fleet, "n1", lambda found: bool(found.agents))
        assert found.agents[0] == Agent(
            "accelplane/agent-n1",
            "",
            "",
            "none",
            "found no port named pages in the pod, expected one; set -http-address of the agent",
        )


async def test_agents_of_other_namespaces_are_ignored(api: KubeApi) -> None:
    async with agents_of(api, "n1"), fleet_of(api, FleetOptions(agent_namespaces=("kube-system",))) as fleet:
        found = await node_with(fleet, "n1", lambda found: True)
        await until(lambda: fleet.synced)
        assert found.agents == ()


async def test_an_update_of_the_agents_loses_no_unit(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (old,), fleet_of(api) as fleet, AgentDouble("n1").serving() as new:
        await connected(fleet, "n1")
        new.units = [unit("card0"), unit("card1"), unit("card2")]
        new.answer = invalid_agent(b"", status="503 Starting")
        api.remove("pods", "agent-n1", "accelplane")
        found = await node_with(fleet, "n1", lambda found: found.agents[0].state == "stale")
        assert (len(found.units), found.agents[0].problem) == (2, "the pod was deleted")
        api.put("pods", new.pod("agent-new"))
        found = await node_with(fleet, "n1", lambda found: len(found.agents) == 2)
        assert len(found.units) == 2
        new.answer = None
        found = await node_with(fleet, "n1", lambda found: len(found.units) == 3)
        assert [each.pod for each in found.agents] == ["accelplane/agent-new"]
        assert old.requests


async def test_the_inventory_of_a_pod_that_is_gone_expires(api: KubeApi) -> None:
    times = msgspec.structs.replace(TIMES, expiry=0.5)
    async with agents_of(api, "n1"), fleet_of(api, times=times) as fleet:
        await connected(fleet, "n1")
        api.remove("pods", "agent-n1", "accelplane")
        found = await node_with(fleet, "n1", lambda found: not found.agents)
        assert [(each.capacity, each.ids) for each in found.resources] == [(2, 0)]
        api.remove("nodes", "n1")
        await until(lambda: not fleet.cluster().nodes)


async def test_an_agent_that_gets_another_address_loses_no_unit(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        api.put("pods", agent.pod() | {"status": {"phase": "Running"}})
        found = await node_with(fleet, "n1", lambda found: len(found.agents) == 2)
        assert {each.problem for each in found.agents} == {
            "the pod has no address yet", "the pod has another address",
        }  # fmt: skip
        assert len(found.units) == 2
        api.put("pods", agent.pod())
        found = await node_with(fleet, "n1", lambda found: len(found.agents) == 1)
        assert (found.agents[0].state, len(found.units)) == ("connected", 2)


async def test_an_agent_whose_pod_was_recreated_on_another_node_is_removed_from_the_first(api: KubeApi) -> None:
    """The watch may miss the deletion, and then the new pod replaces the old one of the same name."""
    async with agents_of(api, "n1"), fleet_of(api) as fleet, AgentDouble("n2").serving() as other:
        await connected(fleet, "n1")
        api.put("nodes", node("n2"))
        api.put("pods", other.pod("agent-n1"))
        await connected(fleet, "n2")
        found = await node_with(fleet, "n1", lambda found: found.agents[0].state == "stale")
        assert found.agents[0].problem == "the pod was deleted"


async def test_a_node_that_cannot_be_read_is_shown_by_its_agent(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await node_with(fleet, "n1", lambda found: found.ready)
        api.put("nodes", node("n1") | {"status": {"capacity": 5}})
        found = await node_with(fleet, "n1", lambda found: not found.ready)
        assert (found.resources[0].capacity, found.resources[0].ids) == (0, 2)
        assert agent.requests


async def test_a_broken_watch_loses_no_change(api: KubeApi) -> None:
    async with agents_of(api, "n1"), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await until(lambda: api.open_watches >= 3)
        for count in range(3, 6):
            api.put("nodes", node("n1", count))
            api.abort_watches()
            await node_with(fleet, "n1", lambda found, count=count: found.resources[0].capacity == count)


async def test_a_pending_pod_is_explained_in_numbers(api: KubeApi) -> None:
    message = "0/2 nodes are available: 2 Insufficient gpu.intel.com/i915."
    conditions = [{"type": "PodScheduled", "status": "False", "message": message}]
    api.put("pods", pod("big", 2, conditions=conditions))
    api.put("pods", {"metadata": {"name": "plain", "namespace": "team"}, "status": {"phase": "Pending"}})
    quota = {"hard": {f"requests.{I915}": "5", "pods": "9"}, "used": {f"requests.{I915}": "4"}}
    api.put("resourcequotas", {"metadata": {"name": "q", "namespace": "team"}, "status": quota})
    async with agents_of(api, "n1", "n2") as doubles, fleet_of(api) as fleet:
        for double in doubles:
            double.units = [unit("card0"), unit("card1", holders=("team/other",))]
        await connected(fleet, "n1", "n2")
        await until(lambda: bool(fleet.cluster().waiting and fleet.cluster().quotas))
        (waiting,) = fleet.cluster().waiting
        assert (waiting.name, waiting.requests, waiting.message) == ("big", {I915: 2}, message)
        assert abs(waiting.since - time.time()) < 60
        (shortage,) = shortages(fleet.cluster())
        assert (shortage.requested, shortage.supply.free, shortage.supply.most_free) == (2, 2, 1)
        assert shortage.quota_left == 1
        api.put("pods", pod("big", 2, node="n1"))
        await until(lambda: not fleet.cluster().waiting)


async def test_holders_of_a_node_without_agent_are_listed_on_demand_and_cached(api: KubeApi) -> None:
    api.put("nodes", node("bare"))
    api.put("pods", pod("p", 2, node="bare"))
    async with fleet_of(api) as fleet:
        await node_with(fleet, "bare", lambda found: True)
        answers = await asyncio.gather(*(fleet.holders("bare") for _ in range(5)))
        assert [[(each.pod, each.count) for each in answer] for answer in answers] == [[("p", 2)]] * 5
        lists = [each for each in api.requests if each.parameters.get("fieldSelector") == "spec.nodeName=bare"]
        assert len(lists) == 1
        (row,) = overview(fleet.cluster())
        assert row.estimated == 1
        assert await fleet.holders("bare,status.phase=x") == ()


async def test_an_error_of_a_holder_list_is_not_cached(api: KubeApi) -> None:
    api.put("nodes", node("bare"))
    async with fleet_of(api) as fleet:
        await until(lambda: fleet.synced and bool(fleet.cluster().nodes))
        api.fault("^GET /api/v1/pods", 403)
        with pytest.raises(ApiError, match="403"):
            await fleet.holders("bare")
        assert await fleet.holders("bare") == ()


async def test_with_all_pods_the_holders_are_part_of_the_snapshot(api: KubeApi) -> None:
    api.put("nodes", node("bare"))
    api.put("pods", pod("p", 2, node="bare"))
    async with fleet_of(api, FleetOptions(pods="all")) as fleet:
        found = await node_with(fleet, "bare", lambda found: bool(found.holders))
        assert [(each.namespace, each.pod, each.count) for each in found.holders] == [("team", "p", 2)]
        assert await fleet.holders("bare") == found.holders
        (row,) = overview(fleet.cluster())
        assert (row.allocated, row.free) == (2, 0)
        (use,) = namespaces(fleet.cluster(), fleet.cluster().time + 3600)
        assert (use.namespace, use.ids, use.share) == ("team", 2, 1.0)
        assert use.device_hours >= 2
        api.remove("pods", "p", "team")
        await node_with(fleet, "bare", lambda found: not found.holders)
        (row,) = overview(fleet.cluster())
        assert (row.allocated, row.free, row.estimated) == (0, 2, 0)


async def test_readings_are_fetched_once_for_all_viewers(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        answers = await asyncio.gather(*(fleet.readings("n1") for _ in range(5)))
        assert {(answer.time, answer.problem) for answer in answers} == {(7.0, "")}
        assert [value.value for value in answers[0].devices[0].values] == [41.0]
        assert sum("/api/v1/readings" in request for request in agent.requests) == 1


async def test_missing_readings_have_a_reason(api: KubeApi) -> None:
    api.put("nodes", node("bare"))
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await node_with(fleet, "bare", lambda found: True)
        agent.answer = invalid_agent(b"[]")
        answer = await fleet.readings("n1")
        assert answer.problem.startswith("accelplane/agent-n1: readings: Expected `object`")
        assert (await fleet.readings("bare")).problem == "no agent of this node answers"
        assert (await fleet.readings("none")).problem == "no such node"


async def test_an_api_server_that_does_not_answer_is_a_problem_of_the_snapshot_only(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with agents_of(api, "n1") as (agent,), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await api.stop()
        await until(lambda: "requests to the API server have failed since" in fleet.cluster().problem, 20)
        agent.units = agent.units[:1]
        agent.change()
        await node_with(fleet, "n1", lambda found: len(found.units) == 1)
        await api.start()
        api.put("nodes", node("n1", 9))
        await node_with(fleet, "n1", lambda found: found.resources[0].capacity == 9)


async def test_without_the_right_to_list_quotas_everything_else_works(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    quotas = api.fault("resourcequotas", 403, times=1_000_000)
    async with agents_of(api, "n1"), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await until(lambda: api.count("GET .*/resourcequotas") > 3)
        quotas.times = 0
        usage = {"hard": {f"requests.{I915}": "5"}, "used": {}}
        api.put("resourcequotas", {"metadata": {"name": "q", "namespace": "team"}, "status": usage})
        await until(lambda: bool(fleet.cluster().quotas))
    assert len([each for each in caplog.messages if "resource quotas are not shown" in each]) == 1


def plugin_resource(name: str = "gpu", desired: int = 2, ready: int = 2) -> dict[str, object]:
    status = {"desiredNumberScheduled": desired, "numberReady": ready, "nodeNames": ["n1", "n2"]}
    return {"metadata": {"name": name}, "status": status}


async def test_device_plugins_of_the_operator_are_shown_with_their_changes(api: KubeApi) -> None:
    api.put("gpudeviceplugins", plugin_resource())
    async with fleet_of(api) as fleet:
        await until(lambda: fleet.cluster().device_plugins == (DevicePlugin("GpuDevicePlugin", "gpu", 2, 2, 2),))
        api.put("sgxdeviceplugins", plugin_resource("sgx", ready=1))
        await until(lambda: len(fleet.cluster().device_plugins) == 2)
        assert [(each.name, each.problem) for each in fleet.cluster().device_plugins] == [
            ("sgx", "1 of 2 pods is not ready"), ("gpu", ""),
        ]  # fmt: skip
        api.put("gpudeviceplugins", plugin_resource() | {"status": {"numberReady": "junk"}})
        await until(lambda: "cannot be decoded" in fleet.cluster().device_plugins[0].problem)
        api.remove("gpudeviceplugins", "gpu")
        api.remove("sgxdeviceplugins", "sgx")
        await until(lambda: not fleet.cluster().device_plugins)


async def test_of_many_device_plugins_those_with_problems_are_shown(api: KubeApi) -> None:
    for index in range(60):
        api.put("gpudeviceplugins", plugin_resource(f"gpu-{index:02}", ready=2 if index < 59 else 0))
    async with fleet_of(api) as fleet:
        await until(lambda: fleet.cluster().more_device_plugins == 10)
        names = [each.name for each in fleet.cluster().device_plugins]
        assert names == ["gpu-59", *(f"gpu-{index:02}" for index in range(49))]


@pytest.mark.parametrize(("code", "messages"), [(403, 1), (404, 0)])
async def test_device_plugins_that_may_not_be_read_or_are_not_installed_are_not_shown_until_they_are(
    api: KubeApi, caplog: pytest.LogCaptureFixture, code: int, messages: int
) -> None:
    caplog.set_level(logging.INFO)
    unserved = api.fault("deviceplugins", code, times=1_000_000)
    api.put("gpudeviceplugins", plugin_resource())
    async with agents_of(api, "n1"), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await until(lambda: api.count("GET .*/gpudeviceplugins") > 2)
        await until(lambda: not fleet.cluster().problem)
        assert fleet.cluster().device_plugins == ()
        assert len([each for each in caplog.messages if "deviceplugins" in each]) == messages
        unserved.times = 0
        await until(lambda: bool(fleet.cluster().device_plugins))
        api.fault("deviceplugins", code, times=1_000_000)
        api.abort_watches()
        await until(lambda: not fleet.cluster().device_plugins)
    assert len([each for each in caplog.messages if "device plugins of the operator are not shown" in each]) == messages


async def test_until_nodes_and_pods_are_listed_the_snapshot_says_so(api: KubeApi) -> None:
    unlisted = api.fault("GET .*/nodes", hang=True, times=1)
    async with fleet_of(api) as fleet:
        await until(lambda: api.count("GET .*/nodes") == 1)
        assert fleet.cluster().problem == "nodes and pods have not been listed yet"
        await until(lambda: not unlisted.times and "failed since" in fleet.cluster().problem)
        await until(lambda: fleet.synced)


async def test_an_empty_cluster_is_no_problem(api: KubeApi) -> None:
    async with fleet_of(api) as fleet:
        await until(lambda: fleet.synced and not fleet.cluster().problem)


async def test_without_the_option_device_plugins_are_not_requested(api: KubeApi) -> None:
    async with agents_of(api, "n1"), fleet_of(api, FleetOptions(device_plugins=False, quotas=False)) as fleet:
        await connected(fleet, "n1")
    assert api.count("deviceplugins") == 0
    assert api.count("resourcequotas") == 0


async def test_a_token_is_sent_over_verified_tls_only(api: KubeApi, tmp_path: Path) -> None:
    authority = Authority("agents")
    (tmp_path / "ca.crt").write_bytes(authority.credentials.certificate)
    (tmp_path / "token").write_text("secret\n")
    context = server_context(authority, "accelplane-agent", tmp_path)
    secure = FleetOptions(agent_ca=str(tmp_path / "ca.crt"), agent_token=str(tmp_path / "token"))
    async with AgentDouble("n1").serving(context) as agent, AgentDouble("n2").serving() as plain:
        api.put("pods", agent.pod())
        api.put("pods", plain.pod())
        async with fleet_of(api, secure) as fleet:
            await connected(fleet, "n1")
            await node_with(fleet, "n2", lambda found: bool(found.agents[0].problem))
        assert "Authorization: Bearer secret" in agent.requests[0]
        assert plain.requests == []
        api.remove("pods", "agent-n1", "accelplane")
        async with fleet_of(api, msgspec.structs.replace(secure, agent_ca="")) as fleet:
            await connected(fleet, "n2")
        assert not [request for request in plain.requests if "Authorization" in request]


async def test_the_certificate_of_an_agent_must_have_the_expected_name(api: KubeApi, tmp_path: Path) -> None:
    authority = Authority("agents")
    (tmp_path / "ca.crt").write_bytes(authority.credentials.certificate)
    options = FleetOptions(agent_ca=str(tmp_path / "ca.crt"))
    async with AgentDouble("n1").serving(server_context(authority, "another", tmp_path)) as agent:
        api.put("pods", agent.pod())
        async with fleet_of(api, options) as fleet:
            found = await node_with(fleet, "n1", lambda found: bool(found.agents[0].problem))
            assert "certificate verify failed" in found.agents[0].problem


def device_events(api: KubeApi) -> list[tuple[str, str, str, str]]:
    found = [
        (each["regarding"]["kind"], each["regarding"]["name"], each["type"], each["reason"])
        for each in api.all("events")
    ]
    return sorted(found)


async def test_a_change_of_health_becomes_one_event_on_the_node_and_on_the_pods_that_hold_the_device(
    api: KubeApi,
) -> None:
    api.put("pods", pod("mine", node="n1"))
    api.put("pods", pod("elsewhere", node="n2"))
    holders = ("team/mine", "team/elsewhere", "team/gone", "Team/no name")
    async with agents_of(api, "n1") as (agent,), fleet_of(api, FleetOptions(events=True)) as fleet:
        agent.units = [unit("card0", holders=holders), unit("card1", "unhealthy")]
        await connected(fleet, "n1")
        agent.units[0] |= {"phase": "unhealthy", "reason": "temperature", "text": "93 °C"}
        agent.change()
        await until(lambda: len(api.all("events")) == 2)
        agent.units[0] |= {"text": "95 °C"}
        agent.change()
        await node_with(fleet, "n1", lambda found: found.units[0].text == "95 °C")
        assert device_events(api) == [
            ("Node", "n1", "Warning", "DeviceUnhealthy"),
            ("Pod", "mine", "Warning", "DeviceUnhealthy"),
        ]
        (note,) = {each["note"] for each in api.all("events")}
        assert note == "gpu device card0 of node n1 is unhealthy: temperature: 93 °C; 4 of 4 IDs are held"


async def test_without_the_right_to_write_events_one_warning_is_logged(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.fault("POST .*events", 403, times=100)
    async with agents_of(api, "n1") as (agent,), fleet_of(api, FleetOptions(events=True)) as fleet:
        await connected(fleet, "n1")
        for number in range(2):
            agent.units[number]["phase"] = "unhealthy"
            agent.change()
            await until(lambda count=number + 1: api.count("POST .*events") == count)

        def warnings() -> list[str]:
            return [each for each in caplog.messages if "no events are written" in each]

        await until(lambda: bool(warnings()))
    assert len(warnings()) == 1


async def test_metrics_show_nodes_and_agents_by_state(api: KubeApi) -> None:
    client = Client(api.config, field_manager="test", timeout=1)
    api.put("nodes", node("bare"))
    async with agents_of(api, "n1"), fleet_of(api, client=client) as fleet:
        await connected(fleet, "n1")
        await node_with(fleet, "bare", lambda found: True)
        text = generate_latest(client.metrics.registry).decode()
    assert 'accelplane_fleet_nodes{state="connected"} 1.0' in text
    assert 'accelplane_fleet_nodes{state="no_agent"} 1.0' in text
    assert 'accelplane_fleet_agents{state="connected"} 1.0' in text
    assert "accelplane_fleet_inventory_bytes_count 1.0" in text
    assert "accelplane_fleet_generation " in text


def server_context(authority: Authority, name: str, folder: Path) -> ssl.SSLContext:
    issued = authority.server(name, name)
    (folder / "tls.pem").write_bytes(issued.certificate + issued.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context
