"""The fleet against the double of the API server: nodes, pods, holders, quotas, device plugins, events."""

import asyncio
import logging
import time

import pytest
from apicalls import FLEET, calls, recorded
from fleetagents import I915, node, pod, unit
from kubeapi import KubeApi
from prometheus_client import generate_latest
from runningfleets import agents_of, connected, fleet_of, node_with
from waiting import until

from accelplane.apiserver import ApiError
from accelplane.fleet.arithmetic import namespaces, overview, shortages
from accelplane.fleet.model import DevicePlugin
from accelplane.fleet.options import FleetOptions
from accelplane.kube.client import Client


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
    assert (agent.pod, agent.name, agent.version) == ("kube-system/agent-n1", "accelplane node", "1.0.0")
    (resource,) = found.resources
    assert (resource.capacity, resource.ids, resource.stage) == (2, 2, "registered")
    assert (bare.agents, bare.units, bare.ready, bare.labels) == ((), (), True, {"zone": "a"})
    assert [(each.name, each.capacity, each.stage) for each in bare.resources] == [(I915, 3, "")]


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


async def test_pods_that_wait_for_claims_are_shown_with_the_driver(api: KubeApi) -> None:
    def claim(name: str, device_class: str, **status: object) -> None:
        request = {"name": "device", "exactly": {"deviceClassName": device_class, "count": 2}}
        spec = {"devices": {"requests": [request]}}
        api.put("resourceclaims", {"metadata": {"name": name, "namespace": "team"}, "spec": spec, "status": status})

    driver = "gpu.intel.com"
    for name, extended in (("large", None), ("i915", I915)):
        selectors = [{"cel": {"expression": f'device.driver == "{driver}"'}}]
        spec = {"selectors": selectors, "extendedResourceName": extended}
        api.put("deviceclasses", {"metadata": {"name": name}, "spec": spec})
    claim("foreign", "gpu.example.com")
    for name, claims in (("early", "late"), ("other", "foreign")):
        waiting = pod(name, 0)
        waiting["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claims}]
        api.put("pods", waiting)
    api.put("pods", pod("resource", 1))
    async with fleet_of(api) as fleet:
        await until(lambda: [each.requests for each in fleet.cluster().waiting] == [{driver: 1}])
        claim("late", "large")
        await until(lambda: [each.requests for each in fleet.cluster().waiting] == [{driver: 2}, {driver: 1}])
        claim("late", "large", allocation={"devices": {}})
        await until(lambda: [each.name for each in fleet.cluster().waiting] == ["resource"])


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


async def test_the_use_of_all_devices_is_read_without_an_open_page(api: KubeApi) -> None:
    options = FleetOptions(use_interval=1)
    async with agents_of(api, "n1", "n2"), fleet_of(api, options) as fleet:
        await until(lambda: fleet.use.size == 2)
        card = fleet.cluster().nodes["n1"].units[0]
        assert fleet.use.of("n1", card, time.time()).temperature == 41.0


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


async def test_the_calls_are_those_of_the_role_and_those_of_the_optional_quotas(api: KubeApi) -> None:
    async with agents_of(api, "n1"), fleet_of(api) as fleet:
        await connected(fleet, "n1")
        await until(lambda: recorded(api.requests) >= FLEET)
        assert recorded(api.requests) - FLEET <= calls("", "resourcequotas", "list watch")
