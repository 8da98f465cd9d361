"""The controller of Onload resources against the double of the API server, with a KMM and DaemonSets that react."""

import copy
from typing import Any

import pytest
from kubeapi import KubeApi
from onloadoperators import VERSION, events, operator, running
from onloadresources import MAPPING
from onloadsetup import NAMES, Setup, app, definition, node
from waiting import until

from accelplane.onload.names import FINALIZER

pytestmark = pytest.mark.virtual_time


async def test_a_new_resource_gets_modules_labels_and_the_device_plugin(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
    assert setup.versions() == {(VERSION, VERSION, VERSION)}
    assert {each["metadata"]["name"] for each in api.all("modules")} == {"onload-module", "onload-sfcmod"}
    sfc = api.get("modules", "onload-sfcmod", "default") or {}
    assert sfc["spec"]["moduleLoader"]["container"]["inTreeModulesToRemove"] == ["sfc"]
    status = setup.status()
    assert status["onload"] | {"history": 0} == {
        "version": VERSION,
        "nodesMatching": 2,
        "nodesLabelled": 2,
        "nodesModuleReady": 2,
        "nodesUpgraded": 2,
        "currentNodes": [],
        "blockingPods": [],
        "history": 0,
    }
    assert status["onload"]["history"][0]["state"] == "Verified"
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "Ready": "True",
        "Progressing": "False",
        "Degraded": "False",
    }
    assert (setup.onload() or {})["metadata"]["finalizers"] == [FINALIZER]


async def test_nothing_is_written_when_nothing_differs(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup):
        async with operator(api):
            await until(lambda: setup.is_ready(VERSION))
        writes = api.count("^(PATCH|POST|PUT)")
        async with operator(api):
            await until(lambda: api.count("GET .*customresourcedefinitions") == 2)
            beaten = node("node-0")
            known = api.get("nodes", "node-0") or {}
            beaten["metadata"] = known["metadata"]
            beaten["status"] = {**known["status"], "images": [{"names": ["heartbeat"]}]}
            api.put("nodes", beaten)
    assert api.count("^(PATCH|POST|PUT)") == writes


async def test_deletion_releases_the_nodes_before_the_finalizer_is_removed(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-1"))
        setup.delete()
        await until(lambda: setup.onload() is None)
    assert not setup.leftovers()
    assert not setup.apps("node-1")


async def test_labels_of_a_resource_deleted_without_an_operator_are_removed(api: KubeApi) -> None:
    setup = Setup(api)
    gate = {NAMES.module_label: "1", NAMES.sfc_label: "1", NAMES.gate_label: "1"}
    foreign = {"kmm.node.kubernetes.io/version-module.other.gpu-module": "1", "onload.amd.com/version": "1"}
    api.put("nodes", node("node-9", **gate, **foreign))
    async with running(setup), operator(api):
        await until(lambda: not setup.leftovers())
    assert foreign.items() <= setup.labels("node-9").items()


async def test_a_condition_reports_missing_kmm_until_it_is_installed(api: KubeApi) -> None:
    setup = Setup(api, kmm=False)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.condition("Degraded").get("reason") == "KmmMissing")
        assert setup.condition("Ready")["status"] == "False"
        assert not setup.leftovers()
        api.put("customresourcedefinitions", definition(in_tree_list=False))
        await until(lambda: setup.is_ready(VERSION), 30)


async def test_the_role_of_the_go_operator_is_enough(api: KubeApi) -> None:
    api.fault("GET .*/customresourcedefinitions", 403, times=1_000_000)
    api.fault("POST .*/events", 403, times=1_000_000)
    setup = Setup(api)
    setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
    sfc = api.get("modules", "onload-sfcmod", "default") or {}
    assert sfc["spec"]["moduleLoader"]["container"]["inTreeModuleToRemove"] == "sfc"


async def test_a_module_that_kmm_rejects_is_reported(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    fault = api.fault("POST .*/modules", 422, times=1_000_000)
    async with running(setup), operator(api):
        await until(lambda: setup.condition("Degraded").get("reason") == "ModuleRejected")
        assert not setup.leftovers()
        fault.times = 0
        await until(lambda: setup.is_ready(VERSION), 20)


async def test_a_change_of_a_node_that_is_rejected_is_reported(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    fault = api.fault("PATCH .*/nodes/node-1", 403, times=1_000_000)
    async with running(setup), operator(api):
        await until(lambda: setup.condition("Degraded").get("reason") == "WriteRejected")
        assert "/nodes/node-1" in setup.condition("Degraded")["message"]
        await until(lambda: setup.labels("node-0").get(NAMES.gate_label) == VERSION)
        fault.times = 0
        await until(lambda: setup.is_ready(VERSION), 20)
        setup.delete()
        fault.times = 1_000_000
        await until(lambda: setup.condition("Degraded").get("reason") == "WriteRejected")
        fault.times = 0
        await until(lambda: setup.onload() is None, 20)


async def test_an_object_of_others_with_the_same_name_is_reported(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    api.put("modules", {"metadata": {"name": "onload-module", "namespace": "default"}, "spec": {"mine": True}})
    async with running(setup), operator(api):
        await until(lambda: setup.condition("Degraded").get("reason") == "NameConflict")
    assert (api.get("modules", "onload-module", "default") or {})["spec"] == {"mine": True}


async def test_the_last_change_of_another_program_is_corrected_too(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()

    def daemonset() -> Any:
        return copy.deepcopy(api.get("daemonsets", NAMES.daemonset, NAMES.namespace))

    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        expected = daemonset()["metadata"]["labels"]
        for value in ("first", "second"):
            drifted = daemonset()
            drifted["metadata"]["labels"] = dict.fromkeys(expected, value)
            api.put("daemonsets", drifted)
            await until(lambda: daemonset()["metadata"]["labels"] == expected)


async def test_modules_that_are_loaded_otherwise_need_no_kmm(api: KubeApi) -> None:
    setup = Setup(api, kmm=False)
    setup.create(onload__kernelMappings=[], onload__moduleManagement="External")
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
    assert setup.versions() == {(None, None, VERSION)}


async def test_modules_are_released_and_deleted_when_kmm_does_not_manage_them_any_more(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        setup.create(onload__kernelMappings=[], onload__moduleManagement="External")
        await until(lambda: setup.is_ready(VERSION) and not api.all("modules"), 30)
        assert setup.versions() == {(None, None, VERSION)}
        setup.create(onload__kernelMappings=[{**MAPPING, "sfc": {}}])
        await until(lambda: setup.is_ready(VERSION) and setup.versions() == {(VERSION, VERSION, VERSION)}, 30)
    assert setup.most_down == 1


@pytest.mark.parametrize(
    ("name", "paths", "reason"),
    [
        ("x" * 30, {}, "NameTooLong"),
        ("onload", {"onload__version": "not/a/label"}, "InvalidVersion"),
        ("onload", {"onload__kernelMappings": []}, "InvalidSpec"),
        ("onload", {"upgrade__nodeTimeout": "soon"}, "InvalidSpec"),
    ],
)
async def test_a_resource_that_cannot_be_reconciled_has_a_condition_with_the_reason(
    api: KubeApi, name: str, paths: dict[str, Any], reason: str
) -> None:
    setup = Setup(api, names=NAMES._replace(name=name))
    setup.create(**paths)
    async with running(setup), operator(api):
        await until(lambda: setup.condition("Degraded").get("reason") == reason)
    assert setup.condition("Ready")["status"] == "False"
    assert not api.all("modules")
    assert not setup.leftovers()


async def test_a_status_that_does_not_fit_is_replaced(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    api.put("onloads", {**setup.create(), "status": {"onload": {"version": 1}}})
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))


async def test_a_malformed_resource_keeps_its_objects_and_is_reported(api: KubeApi) -> None:
    setup = Setup(api)
    setup.create()
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        setup.create(onload__kernelMappings="none")
        await until(lambda: len(events(api, "Malformed")) == 1)
        assert "kernelMappings" in events(api, "Malformed")[0]
        assert setup.versions() == {(VERSION, None, VERSION)}
        assert api.get("modules", "onload-module", "default")


async def test_an_empty_selector_selects_all_nodes(api: KubeApi) -> None:
    setup = Setup(api)
    bare = node("node-2")
    bare["metadata"]["labels"] = {}
    api.put("nodes", bare)
    setup.create(selector={})
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
    assert setup.versions() == {(VERSION, None, VERSION)}
    assert setup.labels("node-2")[NAMES.gate_label] == VERSION


async def test_a_second_resource_waits_for_the_nodes_of_the_first_and_its_deletion_changes_nothing_there(
    api: KubeApi,
) -> None:
    setup = Setup(api)
    setup.create()
    other = Setup(api, nodes=0, names=NAMES._replace(name="other"))
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        api.put("pods", app("app", "node-0"))
        api.put("nodes", node("node-2", zone="b"))
        await until(lambda: setup.labels("node-2").get(NAMES.gate_label) == VERSION)
        other.create(selector={})
        message = "Onload default/onload has the node; change a selector"
        await until(lambda: message in other.condition("Ready").get("message", ""))
        setup.create(onload__version="8.2")
        await until(lambda: setup.is_ready("8.2"), 30)
        assert not setup.apps("node-0")
        api.put("pods", app("again", "node-0"))
        assert not other.leftovers()
        other.delete()
        await until(lambda: other.onload() is None, 20)
        assert setup.apps("node-0") == ["again"]
        assert setup.versions() == {("8.2", None, "8.2")}


async def test_the_deletion_of_a_resource_does_not_evict_pods_of_another_one_that_has_the_node(api: KubeApi) -> None:
    """Both have labels on the node, as earlier releases allowed."""
    setup = Setup(api, nodes=1)
    setup.create()
    other = Setup(api, nodes=0, names=NAMES._replace(name="other"))
    async with running(setup), operator(api):
        await until(lambda: setup.is_ready(VERSION))
        found = api.get("nodes", "node-0") or {}
        found["metadata"]["labels"] |= dict.fromkeys((other.names.module_label, other.names.gate_label), VERSION)
        api.put("nodes", found)
        other.create()
        await until(lambda: "has the node" in other.condition("Ready").get("message", ""))
        api.put("pods", app("app", "node-0"))
        other.delete()
        await until(lambda: other.onload() is None, 30)
    assert not other.leftovers()
    assert setup.apps("node-0") == ["app"]
    assert setup.versions() == {(VERSION, None, VERSION)}


async def test_two_resources_that_select_the_same_nodes_both_report_it(api: KubeApi) -> None:
    setup = Setup(api, nodes=1)
    setup.create()
    other = Setup(api, nodes=0, names=NAMES._replace(name="other"))
    other.create()
    async with running(setup), operator(api):
        for each, name in ((setup, "default/other"), (other, "default/onload")):
            await until(lambda each=each: each.condition("Degraded").get("reason") == "SelectorOverlap")
            assert name in each.condition("Degraded")["message"]
