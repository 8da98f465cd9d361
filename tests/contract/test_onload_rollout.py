"""Changes of Onload that are rolled out node by node: evictions, order, failed upgrades, probe pods."""

import asyncio
import json
from typing import Any

import pytest
from kubeapi import KubeApi
from onloadoperators import VERSION, events, operator, running
from onloadresources import MAPPING
from onloadsetup import NAMES, Setup, app, node
from waiting import until

pytestmark = pytest.mark.virtual_time

NEW = "8.2"
BUDGET = "The disruption budget web needs 1 healthy pods and has 1 currently"
CAUSE = {"reason": "DisruptionBudget", "message": BUDGET}
PDB = {
    "status": 429,
    "times": 1_000_000,
    "headers": {"Retry-After": "0"},
    "body": json.dumps({"kind": "Status", "reason": "TooManyRequests", "details": {"causes": [CAUSE]}}).encode(),
}


# Evictions


async def test_an_upgrade_evicts_applications_node_by_node(api: KubeApi) -> None:
    setup = Setup(api, nodes=3)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        for index in range(3):
            api.put("pods", app(f"app-{index}", f"node-{index}"))
        setup.create(onload__version=NEW, onload__userImage="onload-user:8.2")
        await until(lambda: setup.is_ready(NEW))
        assert not any(setup.apps(f"node-{index}") for index in range(3))
        await until(lambda: len(events(api, "Verified")) == 3)
    assert api.count("POST .*/eviction") == 3
    assert setup.versions() == {(NEW, None, NEW)}
    assert setup.most_down == 1
    assert events(api, "RemovingGate")[0] == "node node-0: the device plugin stops"
    pod = (api.get("daemonsets", NAMES.daemonset, "default") or {})["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["image"] == "onload-user:8.2"


async def test_a_pod_disruption_budget_delays_the_upgrade_and_is_reported(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        fault = api.fault("POST .*/eviction", **PDB)
        setup.create(onload__version=NEW)
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"])
        found = setup.condition("Degraded")
        assert (found["status"], found["reason"]) == ("True", "EvictionBlocked")
        assert f"apps/app ({BUDGET})" in found["message"]
        assert setup.labels("node-0")[NAMES.module_label] == VERSION
        fault.times = 0
        await until(lambda: setup.is_ready(NEW), 20)
        assert setup.condition("Degraded")["status"] == "False"


async def test_an_eviction_that_is_rejected_for_another_reason_is_reported_and_does_not_delay_others(
    api: KubeApi,
) -> None:
    setup = Setup(api)
    setup.create()
    message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
    body = json.dumps({"kind": "Status", "reason": "InternalError", "message": message}).encode()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        api.put("pods", app("other", "node-0"))
        fault = api.fault("POST .*/app/eviction", status=500, body=body, times=1_000_000)
        setup.create(onload__version=NEW)
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"])
        assert setup.condition("Degraded")["reason"] == "EvictionBlocked"
        assert f"apps/app ({message[:-1]})" in setup.condition("Degraded")["message"]
        assert setup.apps("node-0") == ["app"]
        fault.times = 0
        await until(lambda: setup.is_ready(NEW), 20)


async def test_a_pod_missing_in_the_cache_prevents_unloading_a_module(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.pause_watches()
        api.put("pods", app("app", "node-0"))
    async with running(setup), operator(api):
        fault = api.fault("GET /api/v1/pods", 500, skip=1, times=3)
        setup.create(onload__version=NEW)
        await until(lambda: setup.is_ready(NEW), 20)
        assert not fault.times


async def test_a_new_pod_of_the_same_name_on_another_node_is_not_evicted(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        fault = api.fault("POST .*/eviction", **PDB)
        setup.create(onload__version=NEW)
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"])
        api.pause_watches()
        api.remove("pods", "app", "apps")
        moved = app("app", "node-1")
        api.put("pods", {**moved, "metadata": {**moved["metadata"], "uid": "another"}})
        fault.times = 0
        evictions = api.count("POST .*/eviction")
        await until(lambda: api.count("POST .*/eviction") > evictions + 1, 30)
        assert setup.apps("node-1") == ["app"]


async def test_a_budget_that_delays_a_deletion_is_in_the_status(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-1"))
        fault = api.fault("POST .*/eviction", **PDB)
        setup.delete()
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"])
        assert setup.condition("Degraded")["reason"] == "EvictionBlocked"
        assert BUDGET in setup.condition("Degraded")["message"]
        assert setup.condition("Ready")["reason"] == "Deleting"
        await until(lambda: [each["name"] for each in setup.status()["onload"]["currentNodes"]] == ["node-1"])
        fault.times = 0
        await until(lambda: setup.onload() is None, 20)
    assert not setup.leftovers()


# Order


async def test_a_changed_selector_releases_nodes_before_the_module_follows(api: KubeApi) -> None:
    setup = Setup(api)
    api.put("nodes", node("node-2", zone="b"))
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        setup.create(selector={"zone": "b"})
        await until(lambda: setup.is_ready(VERSION))
        await until(lambda: (api.get("modules", "onload-module", "default") or {})["spec"]["selector"] == {"zone": "b"})
    assert not [each for each in setup.leftovers() if "node-2" not in each]
    assert setup.labels("node-2")[NAMES.gate_label] == VERSION


async def test_new_nodes_wait_for_the_release_of_an_old_node_and_name_it(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    api.put("nodes", node("node-2", zone="b"))
    setup.create(selector={"zone": "a"})
    found = api.get("nodes", "node-0") or {}
    found["metadata"]["labels"]["zone"] = "a"
    api.put("nodes", found)
    limits = {"upgrade__nodeTimeout": "1s", "upgrade__verify__strict": True}
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        fault = api.fault("POST .*/eviction", **PDB)
        setup.create(selector={"zone": "b"}, **limits)
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"])
        await asyncio.sleep(5)
        assert NAMES.gate_label not in setup.labels("node-2")
        assert setup.condition("Degraded")["reason"] == "EvictionBlocked"
        waiting = "waits for the release of node node-0, which the selector does not match any more"
        steps = {each["name"]: each["message"] for each in setup.status()["onload"]["currentNodes"]}
        assert steps["node-2"] == waiting
        fault.times = 0
        await until(lambda: setup.is_ready(VERSION), 30)


async def test_a_dead_node_that_is_not_selected_any_more_does_not_delay_the_others(api: KubeApi) -> None:
    setup = Setup(api, nodes=3)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        dead = api.get("nodes", "node-0") or {}
        dead["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
        del dead["metadata"]["labels"]["node-role.kubernetes.io/worker"]
        api.put("nodes", dead)
        setup.create(onload__version=NEW)
        await until(lambda: setup.is_ready(NEW), 30)
        assert setup.labels("node-0")[NAMES.gate_label] == VERSION
        dead = api.get("nodes", "node-0") or {}
        dead["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        api.put("nodes", dead)
        await until(lambda: NAMES.gate_label not in setup.labels("node-0"), 30)


async def test_nodes_with_another_kernel_and_cordoned_nodes_have_their_own_reason(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    kernel, cordoned = node("node-1"), node("node-2")
    kernel["status"]["nodeInfo"]["kernelVersion"] = "6.1"
    cordoned["spec"]["unschedulable"] = True
    for each in (kernel, cordoned):
        api.put("nodes", each)
    setup.create(onload__kernelMappings=[{**MAPPING, "regexp": "^5"}])
    async with running(setup), operator(api):
        await until(lambda: setup.labels("node-0").get(NAMES.gate_label) == VERSION)
        await until(lambda: len(setup.status().get("onload", {}).get("currentNodes", ())) == 2)
        found = {each["name"]: each["step"] for each in setup.status()["onload"]["currentNodes"]}
        assert found == {"node-1": "NoKernelMapping", "node-2": "Cordoned"}
        setup.create(onload__kernelMappings=[{**MAPPING, "regexp": "^5"}, {**MAPPING, "regexp": "^6", "sfc": {}}])
        await until(lambda: setup.labels("node-1").get(NAMES.sfc_label) == VERSION)
        found = api.get("nodes", "node-2") or {}
        found["spec"]["unschedulable"] = False
        api.put("nodes", found)
        await until(lambda: setup.is_ready(VERSION))
    assert {name: setup.labels(name).get(NAMES.sfc_label) for name in ("node-0", "node-1", "node-2")} == {
        "node-0": None,
        "node-1": VERSION,
        "node-2": None,
    }


async def test_sfc_is_added_and_removed_in_order(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
        await until(lambda: setup.is_ready(VERSION))
        assert setup.versions() == {(VERSION, VERSION, VERSION)}
        setup.create()
        await until(lambda: setup.is_ready(VERSION) and api.get("modules", "onload-sfcmod", "default") is None)
    assert setup.versions() == {(VERSION, None, VERSION)}
    assert setup.most_down == 1


async def test_other_images_of_the_same_version_are_rolled_out_in_order(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        setup.create(onload__kernelMappings=[{**MAPPING, "kernelModuleImage": "other"}])
        await until(lambda: (setup.status()["onload"]["version"]) != VERSION)
        suffixed = setup.status()["onload"]["version"]
        await until(lambda: setup.is_ready(suffixed))
    assert suffixed.startswith(f"{VERSION}-")
    assert setup.versions() == {(suffixed, None, suffixed)}
    assert setup.most_down == 1


def images(*found: str) -> list[dict[str, Any]]:
    return [{**MAPPING, "kernelModuleImage": each} for each in found]


async def test_a_version_that_comes_back_with_another_image_does_not_reload_modules_under_applications(
    api: KubeApi,
) -> None:
    setup = Setup(api)
    setup.create(onload__kernelMappings=images("one"))
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-1"))
        setup.create(onload__version=NEW, onload__kernelMappings=images("two"))
        await until(lambda: setup.labels("node-0").get(NAMES.module_label) == NEW)
        fault = api.fault("POST .*/eviction", **PDB)
        setup.create(onload__kernelMappings=images("three"))
        await until(lambda: setup.status()["onload"]["blockingPods"] == ["apps/app"], 30)
        fault.times = 0
        await until(lambda: setup.condition("Ready").get("status") == "True", 30)
    ((module, _, gate),) = setup.versions()
    assert module == gate
    assert str(module).startswith(f"{VERSION}-")
    labels = {
        each["label"]: each["kernelMappings"][0]["kernelModuleImage"] for each in setup.status()["onload"]["history"]
    }
    assert labels == {module: "three", NEW: "two", VERSION: "one"}


async def test_a_revert_to_modules_that_nodes_still_have_evicts_nothing_there(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create(onload__kernelMappings=images("one"))
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        for name in ("node-0", "node-1"):
            api.put("pods", app(f"app-{name}", name))
        api.fault("POST .*/app-node-1/eviction", **PDB)
        setup.create(onload__kernelMappings=images("two"))
        await until(lambda: setup.labels("node-0").get(NAMES.module_label, "").startswith(f"{VERSION}-"), 30)
        setup.create(onload__kernelMappings=images("one"))
        await until(lambda: setup.is_ready(VERSION), 30)
    assert setup.apps("node-1") == ["app-node-1"]
    assert setup.versions() == {(VERSION, None, VERSION)}


async def test_another_image_for_one_kernel_changes_nothing_on_nodes_with_another_kernel(api: KubeApi) -> None:
    setup = Setup(api)
    other = node("node-1")
    other["status"]["nodeInfo"]["kernelVersion"] = "6.1"
    api.put("nodes", other)
    five = {"regexp": "^5", "kernelModuleImage": "five"}
    setup.create(onload__kernelMappings=[five, {"regexp": "^6", "kernelModuleImage": "six"}])
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app-0", "node-0"))
        api.put("pods", app("app-1", "node-1"))
        changed = [five, {"regexp": "^6", "kernelModuleImage": "other"}]
        setup.create(onload__kernelMappings=changed)
        await until(lambda: setup.status()["onload"]["version"] != VERSION)
        suffixed = setup.status()["onload"]["version"]
        await until(lambda: setup.is_ready(suffixed), 30)
        assert setup.status()["onload"]["nodesLabelled"] == 2
    assert (setup.apps("node-0"), setup.apps("node-1")) == (["app-0"], [])
    assert [setup.labels(f"node-{index}")[NAMES.module_label] for index in (0, 1)] == [VERSION, suffixed]


async def test_a_rollback_keeps_the_version_of_nodes_that_were_verified_while_another_was_held(api: KubeApi) -> None:
    setup = Setup(api, nodes=3)
    limits = {"upgrade__nodeTimeout": "1s", "upgrade__autoRollback": True, "upgrade__verify__strict": True}
    setup.create(**limits)
    setup.broken = {"8.3"}
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        held = api.get("nodes", "node-2") or {}
        held["metadata"]["annotations"] = {"onload.amd.com/hold": ""}
        api.put("nodes", held)
        setup.create(onload__version=NEW, **limits)
        await until(lambda: [setup.labels(f"node-{index}").get(NAMES.gate_label) for index in (0, 1)] == [NEW, NEW], 30)
        await until(lambda: len(events(api, "Verified")) == 2)
        api.put("pods", app("app", "node-1"))
        setup.create(onload__version="8.3", **limits)
        await until(lambda: setup.condition("Ready").get("reason") == "RolledBack", 30)
        assert [setup.labels(f"node-{index}")[NAMES.module_label] for index in range(3)] == [NEW, NEW, VERSION]
        assert setup.apps("node-1") == ["app"]
    states = [(each["label"], each.get("state"), each.get("nodes", 0)) for each in setup.status()["onload"]["history"]]
    assert states == [("8.3", "Failed", 0), (NEW, None, 2), (VERSION, "Verified", 1)]


async def test_a_new_device_plugin_image_replaces_pods_one_at_a_time_and_keeps_applications(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup):
        async with operator(api):
            await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        async with operator(api, "other:2"):
            await until(lambda: len(events(api, "Verified")) == 2)
            await until(lambda: setup.is_ready(VERSION))
    assert setup.apps("node-0") == ["app"]
    assert setup.most_down == 1


# Failed upgrades and probe pods


async def test_a_failed_upgrade_returns_to_the_last_verified_version(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    setup.broken = {NEW}
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        limits = {"upgrade__nodeTimeout": "1s", "upgrade__autoRollback": True, "upgrade__verify__strict": True}
        setup.create(onload__version=NEW, **limits)
        await until(lambda: setup.condition("Degraded").get("reason") == "RolledBack", 30)
        await until(lambda: setup.condition("Ready").get("reason") == "RolledBack", 30)
        ready = setup.condition("Ready")
        assert (ready["status"], ready["message"]) == (
            "False",
            f"version {NEW} failed; 2 of 2 nodes are verified with earlier versions",
        )
    assert setup.versions() == {(VERSION, None, VERSION)}
    assert [each["state"] for each in setup.status()["onload"]["history"]] == ["Failed", "Verified"]
    assert setup.most_down == 1


async def test_a_failed_upgrade_without_rollback_stops(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    setup.broken = {NEW}
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        setup.create(onload__version=NEW, upgrade__nodeTimeout="1s", upgrade__verify__strict=True)
        await until(lambda: setup.condition("Degraded").get("reason") == "NodeTimeout", 30)
        assert setup.labels("node-1")[NAMES.gate_label] == VERSION


async def test_a_failed_probe_pod_is_deleted_and_created_again(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelplane.onload.node_steps.PROBE_RETRY", 1.0)
    setup = Setup(api, nodes=1)
    setup.create(upgrade__verify__probe={"image": "probe:1"})

    def probes() -> list[dict[str, Any]]:
        return [each for each in api.all("pods") if "verify" in each["metadata"]["name"]]

    async with running(setup), operator(api):
        await until(lambda: len(probes()) == 1)
        (failed,) = probes()
        api.put("pods", {**failed, "spec": {**failed["spec"], "nodeName": "node-0"}, "status": {"phase": "Failed"}})
        await until(lambda: "failed" in setup.condition("Ready").get("message", ""))
        await until(lambda: bool(probes()) and "phase" not in probes()[0].get("status", {}))
        (again,) = probes()
        api.put("pods", {**again, "spec": {**again["spec"], "nodeName": "node-0"}, "status": {"phase": "Succeeded"}})
        await until(lambda: setup.is_ready(VERSION))
    assert not probes()


async def test_a_probe_pod_verifies_each_node(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    setup.create(upgrade__verify__probe={"image": "probe:1", "command": ["true"]})
    async with running(setup), operator(api):
        await until(lambda: any("verify" in each["metadata"]["name"] for each in api.all("pods")))
        (probe,) = (each for each in api.all("pods") if "verify" in each["metadata"]["name"])
        assert not setup.is_ready(VERSION)
        api.put("pods", {**probe, "spec": {**probe["spec"], "nodeName": "node-0"}, "status": {"phase": "Succeeded"}})
        await until(lambda: setup.is_ready(VERSION))
        await until(lambda: api.get("pods", probe["metadata"]["name"], "default") is None)
