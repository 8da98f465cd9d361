"""The agents of a fleet, doubles over real sockets: inventories, pods, readings, TLS."""

import asyncio
import gzip
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.pki import Authority
from fleetagents import I915, LABELS, AgentDouble, node, unit
from kubeapi import KubeApi
from runningfleets import TIMES, agents_of, connected, fleet_of, invalid_agent, node_with, state
from waiting import until

from accelplane.fleet.model import Agent
from accelplane.fleet.options import FleetOptions
from accelplane.report.inventory import Holder


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
            "found status 302, expected 200",
        ),
        (
            invalid_agent(gzip.compress(b" " * 10_000_000), fields="Content-Encoding: gzip\r\n"),
            "found a content-encoding, expected none",
        ),
        (lambda _head: b"SSH-2.0-x\r\n\r\n", "expected a status line"),
        (
            invalid_agent(msgspec.json.encode(AgentDouble("n2").document)),
            "found the inventory of another node, expected 'n1'",
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
            "found status 403, expected 200; grant it accelplane-inv",
        ),
        (invalid_agent(b"", status="503 Busy"), "found status 503, expected 200"),
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
    pod = double.pod()
    pod["spec"]["containers"] = [{"name": "agent"}]
    api.put("pods", pod)
    async with fleet_of(api) as fleet:
        found = await node_with(fleet, "n1", lambda found: bool(found.agents))
        assert found.agents[0] == Agent(
            "kube-system/agent-n1",
            "",
            "",
            "none",
            "found no port named pages in the pod, expected one; set -http-address of the agent",
        )


async def test_agents_of_other_namespaces_are_ignored(api: KubeApi) -> None:
    async with agents_of(api, "n1"), fleet_of(api, FleetOptions(agent_namespaces=("accelplane",))) as fleet:
        found = await node_with(fleet, "n1", lambda found: True)
        await until(lambda: fleet.synced)
        assert found.agents == ()


IMPOSTORS: list[dict[str, Any]] = [
    {"metadata": {"name": "x", "namespace": "team", "labels": LABELS}},
    {"spec": {"serviceAccountName": "default"}},
    {"spec": {"serviceAccountName": ""}},
]


@pytest.mark.parametrize("changes", IMPOSTORS)
async def test_a_pod_with_the_labels_of_an_agent_needs_its_namespace_and_account(
    api: KubeApi, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with agents_of(api, "n1") as (agent,), AgentDouble("n1").serving() as impostor, fleet_of(api) as fleet:
        await connected(fleet, "n1")
        pod = impostor.pod("impostor")
        api.put("pods", pod | changes | {"spec": pod["spec"] | changes.get("spec", {})})
        await until(lambda: "is ignored: found labels of an agent" in caplog.text)
        agent.change()
        await until(lambda: len(agent.requests) > 2)
        assert impostor.requests == []
        assert [each.pod for each in fleet.cluster().nodes["n1"].agents] == ["kube-system/agent-n1"]


async def test_empty_lists_admit_agents_of_all_namespaces_and_accounts(api: KubeApi) -> None:
    options = FleetOptions(agent_namespaces=(), agent_accounts=())
    async with AgentDouble("n1").serving() as agent, fleet_of(api, options) as fleet:
        api.put("nodes", node("n1"))
        pod = agent.pod()
        del pod["spec"]["serviceAccountName"]
        pod["metadata"]["namespace"] = "team"
        api.put("pods", pod)
        await connected(fleet, "n1")


async def test_no_connection_is_made_to_a_loopback_address(api: KubeApi) -> None:
    async with AgentDouble("n1").serving() as agent:
        api.put("nodes", node("n1"))
        api.put("pods", agent.pod())
        async with fleet_of(api, loopback=False) as fleet:
            found = await node_with(fleet, "n1", lambda found: bool(found.agents and found.agents[0].problem))
            problem = "found pod IP '127.0.0.1', expected an address of the cluster's network"
            assert (found.agents[0].state, found.agents[0].problem) == ("invalid", problem)
        assert agent.requests == []


async def test_an_update_of_the_agents_loses_no_unit(api: KubeApi) -> None:
    async with agents_of(api, "n1") as (old,), fleet_of(api) as fleet, AgentDouble("n1").serving() as new:
        await connected(fleet, "n1")
        new.units = [unit("card0"), unit("card1"), unit("card2")]
        new.answer = invalid_agent(b"", status="503 Starting")
        api.remove("pods", "agent-n1", "kube-system")
        found = await node_with(fleet, "n1", lambda found: found.agents[0].state == "stale")
        assert (len(found.units), found.agents[0].problem) == (2, "the pod was deleted")
        api.put("pods", new.pod("agent-new"))
        found = await node_with(fleet, "n1", lambda found: len(found.agents) == 2)
        assert len(found.units) == 2
        new.answer = None
        found = await node_with(fleet, "n1", lambda found: len(found.units) == 3)
        assert [each.pod for each in found.agents] == ["kube-system/agent-new"]
        assert old.requests


async def test_the_inventory_of_a_pod_that_is_gone_expires(api: KubeApi) -> None:
    times = msgspec.structs.replace(TIMES, expiry=0.5)
    async with agents_of(api, "n1"), fleet_of(api, times=times) as fleet:
        await connected(fleet, "n1")
        api.remove("pods", "agent-n1", "kube-system")
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
        assert answer.problem.startswith("kube-system/agent-n1: readings: Expected `object`")
        assert (await fleet.readings("bare")).problem == "no agent of this node answers"
        assert (await fleet.readings("none")).problem == "no such node"


def server_context(authority: Authority, name: str, folder: Path) -> ssl.SSLContext:
    issued = authority.server(name, name)
    (folder / "tls.pem").write_bytes(issued.certificate + issued.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context


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
        api.remove("pods", "agent-n1", "kube-system")
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
