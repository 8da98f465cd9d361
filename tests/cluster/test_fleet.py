"""The fleet with a real API server and scheduler, kwok nodes, and doubles of agents over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetagents import I915, AgentDouble, unit
from manifests import DEPLOY
from waiting import until

from accelplane.fleet.arithmetic import explain, shortages
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.model import DevicePlugin
from accelplane.fleet.options import FleetOptions
from accelplane.kube.client import Client, load_config
from accelplane.kube.informer import WatchTimeouts

from .cluster import Cluster
from .machine import wait_until

pytestmark = pytest.mark.cluster

USER = "system:serviceaccount:default:accelplane-fleet"
EVENTS_USER = "system:serviceaccount:default:accelplane-fleet-with-events"
HASTE = WatchTimeouts(idle=60, duration=300, first_delay=0.1, max_delay=1)


@pytest.fixture(scope="module")
def api(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane with two nodes that have one GPU each, and the fleet's rights."""
    with Cluster.running([]) as running:
        running.add_kwok_nodes(2, resources={I915: "1"})
        rule = {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "fleet"}}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "fleet"}
        subjects = [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user} for user in (USER, EVENTS_USER)
        ]
        running.apply(
            role | {"kind": "ClusterRole", "rules": [rule]},
            role | {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects},
        )
        resource = "--resource=events.events.k8s.io"
        running.kubectl("create", "clusterrole", "events", "--verb=create,patch", resource)
        running.kubectl("create", "clusterrolebinding", "events", "--clusterrole=events", f"--user={EVENTS_USER}")
        wait_until(lambda: "yes" in running.kubectl("auth", "can-i", "list", "pods", "--as", USER), "rights")
        yield running


@asynccontextmanager
async def fleet_of(
    cluster: Cluster, directory: Path, options: FleetOptions | None = None, user: str = USER
) -> AsyncIterator[Fleet]:
    """A fleet with the rights of a user, by default to list and watch nodes and pods only.

    It soon retries the lists of kinds that the server does not have.
    """
    config = directory / "kubeconfig"
    config.write_text(cluster.user(user))
    client = Client(load_config(str(config)), field_manager="accelplane-fleet")
    options = msgspec.structs.replace(options or FleetOptions(), loopback_agents=True)
    fleet = Fleet(client, options, watch_timeouts=HASTE, unserved_retry=1)
    running = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(30):
            while len(fleet.cluster().nodes) < 2:
                await fleet.changed(fleet.cluster().generation)
        yield fleet
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


def gpu_pod(name: str, count: int) -> dict[str, object]:
    container = {"name": "c", "image": "example.com/none", "resources": {"limits": {I915: str(count)}}}
    tolerations = [{"operator": "Exists"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [container], "tolerations": tolerations},
    }


async def test_a_pending_pod_is_explained_in_numbers_with_the_message_of_the_scheduler(
    api: Cluster, tmp_path: Path
) -> None:
    async with fleet_of(api, tmp_path, FleetOptions(pods="all")) as fleet:
        api.apply(gpu_pod("small", 1), gpu_pod("large", 2))
        await until(lambda: any(each.message for each in fleet.cluster().waiting), 60)
        await until(lambda: any(node.holders for node in fleet.cluster().nodes.values()), 60)
        (waiting,) = fleet.cluster().waiting
        assert waiting.name == "large"
        assert "2 Insufficient gpu.intel.com/i915" in waiting.message
        (shortage,) = shortages(fleet.cluster())
        assert explain(shortage).startswith(
            "Requests 2 of gpu.intel.com/i915. 1 free in the cluster, at most 1 on one node"
        )
        (holder,) = [each for node in fleet.cluster().nodes.values() for each in node.holders]
        assert (holder.pod, holder.count) == ("small", 1)
        api.kubectl("delete", "pod", "large", "--wait=false")
        await until(lambda: not fleet.cluster().waiting, 30)
    api.kubectl("delete", "pod", "small", "--wait=false", "--force", "--grace-period=0")


async def test_an_agent_is_found_by_its_labels_and_its_changes_are_applied(api: Cluster, tmp_path: Path) -> None:
    async with AgentDouble("kwok-0").serving() as agent, fleet_of(api, tmp_path) as fleet:
        pod = agent.pod("agent")
        place_agent(api, pod)
        await until(lambda: len(fleet.cluster().nodes["kwok-0"].units) == 2, 60)
        agent.units = [unit("card0", "unhealthy", reason="temperature")]
        agent.change()
        await until(lambda: fleet.cluster().nodes["kwok-0"].units[0].phase == "unhealthy", 10)
        assert fleet.cluster().nodes["kwok-1"].agents == ()
        (resource,) = fleet.cluster().nodes["kwok-1"].resources
        assert (resource.name, resource.capacity) == (I915, 1)
        api.kubectl("delete", "pod", "agent", "--namespace=kube-system", "--force", "--grace-period=0")
        await until(lambda: fleet.cluster().nodes["kwok-0"].agents[0].state == "stale", 30)
        assert len(fleet.cluster().nodes["kwok-0"].units) == 1


async def test_an_api_server_that_is_down_for_a_while_loses_no_node(api: Cluster, tmp_path: Path) -> None:
    async with fleet_of(api, tmp_path) as fleet:
        api.apiserver.stop()
        await until(lambda: bool(fleet.cluster().problem), 60)
        assert len(fleet.cluster().nodes) == 2
        api.apiserver.start()
        api.kubectl("cordon", "kwok-1")
        await until(lambda: fleet.cluster().nodes["kwok-1"].cordoned, 60)
        await until(lambda: not fleet.cluster().problem, 90)
        api.kubectl("uncordon", "kwok-1")


async def test_device_plugins_are_shown_while_the_operators_definitions_are_installed(
    api: Cluster, tmp_path: Path
) -> None:
    definition = DEPLOY / "operator/crd/bases/deviceplugin.intel.com_gpudeviceplugins.yaml"
    resource = {
        "apiVersion": "deviceplugin.intel.com/v1", "kind": "GpuDevicePlugin", "metadata": {"name": "gpu"}, "spec": {},
    }  # fmt: skip
    status = {"desiredNumberScheduled": 2, "numberReady": 1, "nodeNames": ["kwok-0", "kwok-1"]}
    kinds = "--resource=gpudeviceplugins.deviceplugin.intel.com"
    async with fleet_of(api, tmp_path) as fleet:
        assert fleet.cluster().device_plugins == ()
        api.kubectl("apply", "--server-side", "-f", str(definition))
        api.kubectl("wait", "crd/gpudeviceplugins.deviceplugin.intel.com", "--for=condition=Established")
        api.apply(resource)
        api.kubectl("create", "clusterrole", "plugins", "--verb=list,watch", kinds)
        api.kubectl("create", "clusterrolebinding", "plugins", "--clusterrole=plugins", f"--user={USER}")
        await until(lambda: bool(fleet.cluster().device_plugins), 60)
        assert fleet.cluster().device_plugins[0].problem == "the operator has not written a status"
        patch = json.dumps({"status": status})
        api.kubectl("patch", "gpudeviceplugin", "gpu", "--subresource=status", "--type=merge", f"--patch={patch}")
        expected = DevicePlugin("GpuDevicePlugin", "gpu", 2, 1, 2, "1 of 2 pods is not ready")
        await until(lambda: fleet.cluster().device_plugins == (expected,), 60)
        api.kubectl("delete", "-f", str(definition))
        await until(lambda: not fleet.cluster().device_plugins, 60)


def device_events(cluster: Cluster) -> list[tuple[str, str, str]]:
    """Reason, kind and name of the object of all Events about devices."""
    listed = cluster.get("/apis/events.k8s.io/v1/events")
    assert listed
    return [
        (each["reason"], each["regarding"]["kind"], each["regarding"]["name"])
        for each in listed["items"]
        if each["reportingController"] == "accelplane-fleet"
    ]


async def test_events_are_written_once_per_change_and_within_the_limits(api: Cluster, tmp_path: Path) -> None:
    """Ten a minute, and one of a device in ten minutes."""
    names = [f"card{number}" for number in range(12)]
    holder = gpu_pod("holder", 1)
    holder["spec"] = {**holder["spec"], "nodeName": "kwok-0"}  # type: ignore[dict-item]
    api.apply(holder)
    try:
        async with (
            AgentDouble("kwok-0").serving() as agent,
            fleet_of(api, tmp_path, FleetOptions(events=True), EVENTS_USER) as fleet,
        ):

            async def change(**phases: str) -> None:
                """Changes the phases of devices, and waits until the fleet has them."""
                holders = {"card0": ("default/holder",)}
                agent.units = [unit(name, phases.get(name, "healthy"), holders.get(name, ())) for name in names]
                agent.change()
                expected = [phases.get(name, "healthy") for name in names]
                await until(lambda: [each.phase for each in fleet.cluster().nodes["kwok-0"].units] == expected, 60)

            agent.units = [unit(name) for name in names]
            place_agent(api, agent.pod("agent"))
            await until(lambda: len(fleet.cluster().nodes["kwok-0"].units) == 12, 60)
            await change(card0="unhealthy")
            first = [("DeviceUnhealthy", "Node", "kwok-0"), ("DeviceUnhealthy", "Pod", "holder")]
            await until(lambda: sorted(device_events(api)) == first, 60)
            for _ in range(3):
                await change()
                await change(card0="unhealthy")
            # Two of ten are written, and card0 has had its Event: eight of the other eleven devices get one.
            await change(**dict.fromkeys(names, "unhealthy"))
            await until(lambda: len(device_events(api)) >= 10, 60)
            await change()
            assert sorted(device_events(api)) == sorted([*first, *[("DeviceUnhealthy", "Node", "kwok-0")] * 8])
            described = api.kubectl("describe", "node", "kwok-0")
            assert "gpu device card0 of node kwok-0 is unhealthy" in described
    finally:
        api.kubectl("delete", "pod", "holder", "--force", "--grace-period=0")
        api.kubectl("delete", "pod", "agent", "--namespace=kube-system", "--force", "--grace-period=0")


async def test_without_the_right_to_write_events_the_log_has_one_line(
    api: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = device_events(api)
    try:
        async with (
            AgentDouble("kwok-0").serving() as agent,
            fleet_of(api, tmp_path, FleetOptions(events=True)) as fleet,
        ):
            place_agent(api, agent.pod("agent"))
            for phase in ("healthy", "unhealthy"):
                agent.units = [unit("card0", phase), unit("card1", phase)]
                agent.change()
                await until(lambda phase=phase: [  # type: ignore[misc]
                    each.phase for each in fleet.cluster().nodes["kwok-0"].units
                ] == [phase] * 2, 60)  # fmt: skip
            await until(lambda: "no events are written" in caplog.text, 60)
            agent.units = [unit(f"card{number}", "unhealthy" if number < 2 else "healthy") for number in range(4)]
            agent.change()
            await until(lambda: len(fleet.cluster().nodes["kwok-0"].units) == 4, 60)
            agent.units = [unit(f"card{number}", "unhealthy") for number in range(4)]
            agent.change()
            await until(lambda: fleet.cluster().nodes["kwok-0"].units[3].phase == "unhealthy", 60)
            await asyncio.sleep(1)  # for attempts that are not expected
    finally:
        api.kubectl("delete", "pod", "agent", "--namespace=kube-system", "--force", "--grace-period=0")
    lines = [record.getMessage() for record in caplog.records if "event" in record.getMessage()]
    assert len(lines) == 1, lines
    assert 'cannot create resource "events" in API group "events.k8s.io"' in lines[0]
    assert device_events(api) == before


def place_agent(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Creates an agent's pod on its node, at an address of this machine."""
    with_image = {"name": "agent", "image": "example.com/none"}
    (container,) = pod["spec"]["containers"]
    account = pod["spec"]["serviceAccountName"]
    metadata = {"name": account, "namespace": "kube-system"}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    spec = {
        "nodeName": "kwok-0", "serviceAccountName": account, "containers": [container | with_image],
        "tolerations": [{"operator": "Exists"}],
    }  # fmt: skip
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"], "spec": spec})
    path = "/api/v1/namespaces/kube-system/pods/agent/status"
    wait_until(
        lambda: "Running" in cluster.kubectl("get", "pod", "agent", "--namespace=kube-system"), "the agent: running"
    )
    address = pod["status"]["podIP"]
    change = {"status": {"podIP": address, "podIPs": [{"ip": address}]}}
    code, answer = cluster.request("PATCH", path, change, content="application/merge-patch+json")
    assert code == 200, answer
