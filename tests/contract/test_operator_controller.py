"""The operator's controllers with the double of an API server."""

import copy
from typing import Any

import pytest
from customresources import resource, sample
from kubeapi import KubeApi, Object
from manifests import own_image
from pluginoperators import IMAGE, NAMESPACE, condition, daemonset, has_condition, operator, put
from waiting import until

from accelplane.operator import models
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION
from accelplane.operator.settings import ImagePolicy

pytestmark = pytest.mark.virtual_time


def pod_spec(api: KubeApi, family: str = "gpu", name: str = "mine") -> Any:
    found = daemonset(api, family, name)
    assert found
    return found["spec"]["template"]["spec"]


@pytest.mark.parametrize("family", models.KINDS)
async def test_each_sample_creates_a_daemonset_and_its_deletion_removes_it(api: KubeApi, family: str) -> None:
    expected = sample(family)
    name = expected["metadata"]["name"]
    async with operator(api, family):
        uid = put(api, expected)["metadata"]["uid"]
        await until(lambda: has_condition(api, "Available", "True", family=family, name=name))
        result = daemonset(api, family, name)
        assert result
        assert result["metadata"]["ownerReferences"][0]["uid"] == uid
        assert result["spec"]["template"]["spec"]["containers"][0]["image"] == expected["spec"]["image"]
        status = (api.get(f"{family}deviceplugins", name) or {})["status"]
        assert status["controlledDaemonSet"]["uid"] == result["metadata"]["uid"]

        api.remove(f"{family}deviceplugins", name)
        await until(lambda: not api.all("daemonsets"))


async def test_nothing_is_written_when_nothing_differs(api: KubeApi) -> None:
    put(api, resource("gpu", image=IMAGE))
    async with operator(api, "gpu"):
        await until(lambda: has_condition(api, "Available", "True"))
    writes = api.count("^(PATCH|POST|PUT)")
    async with operator(api, "gpu"):
        await until(lambda: api.count("GET .*gpu-manager-rolebinding") == 2)
    assert api.count("^(PATCH|POST|PUT|DELETE)") == writes


async def test_edits_of_resource_and_daemonset_end_in_the_desired_state(api: KubeApi) -> None:
    desired = resource("gpu", image=IMAGE, sharedDevNum=2)
    async with operator(api, "gpu"):
        put(api, desired)
        await until(lambda: has_condition(api, "Available", "True"))
        put(api, resource("gpu", image=IMAGE, sharedDevNum=3), generation=2)
        await until(lambda: "3" in pod_spec(api)["containers"][0]["args"])
        drifted = daemonset(api)
        assert drifted
        drifted["spec"]["template"]["spec"]["nodeSelector"] = {}
        api.put("daemonsets", drifted)
        await until(lambda: pod_spec(api)["nodeSelector"] == {"kubernetes.io/arch": "amd64"})


async def test_status_names_the_nodes_of_pods(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        result = daemonset(api)
        assert result
        result["status"] = {"desiredNumberScheduled": 2, "numberReady": 1, "updatedNumberScheduled": 2}
        api.put("daemonsets", result)
        for name, place in (("one", "node-b"), ("two", "node-a"), ("three", "")):
            put_pod(api, result, name, place)

        def has_status() -> bool:
            status = (api.get("gpudeviceplugins", "mine") or {})["status"]
            return status.get("nodeNames") == ["node-a", "node-b"] and status["desiredNumberScheduled"] == 2

        await until(has_status)
        assert has_condition(api, "Available", "False")


def put_pod(api: KubeApi, owner: Object, name: str, place: str) -> None:
    metadata = owner["metadata"]
    reference = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": metadata["name"], "uid": metadata["uid"]}
    labels = {"app": "intel-gpu-plugin"}
    about = {
        "name": name,
        "namespace": NAMESPACE,
        "labels": labels,
        "ownerReferences": [reference | {"controller": True}],
    }
    api.put("pods", {"metadata": about, "spec": {"nodeName": place} if place else {}})


async def test_a_foreign_daemonset_is_a_name_conflict_until_it_is_deleted(api: KubeApi) -> None:
    about = {"name": "intel-gpu-plugin-mine", "namespace": NAMESPACE}
    foreign = copy.deepcopy(api.put("daemonsets", {"metadata": about, "spec": {"selector": {}}}))
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Degraded", "True"))
        degraded = condition(api, "Degraded") or {}
        assert degraded["reason"] == "NameConflict"
        assert "expected one controlled by GpuDevicePlugin mine; delete or rename it" in degraded["message"]
        await until(lambda: any(each["reason"] == "NameConflict" for each in api.all("events")))
        assert daemonset(api) == foreign
        # The watch of this one object has begun.
        await until(lambda: api.count("WATCH .*/daemonsets") > 1)
        request_count = api.count("GET .*/daemonsets/intel-gpu-plugin-mine")
        api.remove("daemonsets", "intel-gpu-plugin-mine", NAMESPACE)
        await until(lambda: has_condition(api, "Degraded", "False") and has_condition(api, "Available", "True"))
        assert api.count("GET .*/daemonsets/intel-gpu-plugin-mine") <= request_count + 2


async def test_the_daemonset_of_a_former_resource_of_the_name_is_adopted_and_keeps_its_name(api: KubeApi) -> None:
    reference = {"apiVersion": "deviceplugin.intel.com/v1", "kind": "GpuDevicePlugin", "name": "mine", "uid": "former"}
    labels = {"app": "intel-gpu-plugin"}
    about = {"name": "intel-gpu-plugin", "namespace": NAMESPACE, "labels": labels}
    about |= {"ownerReferences": [reference | {"controller": True, "blockOwnerDeletion": True}]}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {}}}
    uid = api.put("daemonsets", {"metadata": about, "spec": spec})["metadata"]["uid"]
    async with operator(api, "gpu"):
        owner = put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        await until(lambda: any(each["reason"] == "Adopted" for each in api.all("events")))
    (found,) = api.all("daemonsets")
    assert (found["metadata"]["name"], found["metadata"]["uid"]) == ("intel-gpu-plugin", uid)
    assert [each["uid"] for each in found["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE


async def test_a_resource_that_is_being_deleted_is_not_reconciled(api: KubeApi) -> None:
    leaving = resource("gpu", image=IMAGE)
    leaving["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/wait"]}
    async with operator(api, "gpu"):
        put(api, leaving)
        put(api, resource("gpu", "other", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True", name="other"))
    assert daemonset(api) is None
    assert "status" not in (api.get("gpudeviceplugins", "mine") or {})


async def test_corrections_of_a_field_that_another_program_reverts_back_off(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))

        def revert() -> bool:
            """Reverts each correction of the operator. Returns whether the operator reports it."""
            found = daemonset(api)
            assert found
            if found["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE:
                drifted = copy.deepcopy(found)
                drifted["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"
                path = {
                    "f:spec": {
                        "f:template": {"f:spec": {"f:containers": {'k:{"name":"intel-gpu-plugin"}': {"f:image": {}}}}}
                    }
                }
                entries = [each for each in drifted["metadata"]["managedFields"] if each["manager"] != "other-program"]
                other = {"manager": "other-program", "operation": "Update", "apiVersion": "apps/v1", "fieldsV1": path}
                drifted["metadata"]["managedFields"] = [*entries, other]
                api.put("daemonsets", drifted)
            return has_condition(api, "Degraded", "True")

        await until(revert, 30)
        degraded = condition(api, "Degraded") or {}
        assert degraded["reason"] == "FieldConflict"
        assert "image: found" in degraded["message"]
        assert "changed by other-program" in degraded["message"]
        # Three corrections, each with a handover at most, and the one that may be due meanwhile.
        assert api.count("PATCH .*/daemonsets/") <= 8
        await until(lambda: any(each["reason"] == "FieldConflict" for each in api.all("events")))


async def test_a_daemonset_of_an_older_operator_is_adopted_and_duplicates_are_deleted(api: KubeApi) -> None:
    owner = put(api, resource("gpu", image=IMAGE))
    reference = {"apiVersion": "deviceplugin.intel.com/v1", "kind": "GpuDevicePlugin", "name": "mine"}
    reference |= {"uid": owner["metadata"]["uid"], "controller": True}
    by_go = {"manager": "intel_deviceplugin_operator", "operation": "Update", "fieldsV1": {"f:spec": {}}}
    labels = {"app": "intel-gpu-plugin"}
    for name, age in (("intel-gpu-plugin", "2024-01-01T00:00:00Z"), ("intel-gpu-plugin-mine", "2025-01-01T00:00:00Z")):
        about = {"name": name, "namespace": NAMESPACE, "labels": labels, "creationTimestamp": age}
        about |= {"ownerReferences": [reference], "managedFields": [by_go]}
        api.put("daemonsets", {"metadata": about, "spec": {"selector": {"matchLabels": labels}}})
    version = (api.get("daemonsets", "intel-gpu-plugin", NAMESPACE) or {})["metadata"]["resourceVersion"]
    async with operator(api, "gpu"):
        await until(lambda: [each["metadata"]["name"] for each in api.all("daemonsets")] == ["intel-gpu-plugin"])
        await until(lambda: has_condition(api, "Available", "True"))
    patches = [each for each in api.requests if each.method == "PATCH" and each.path.endswith("/intel-gpu-plugin")]
    assert [each.content_type for each in patches] == ["application/json-patch+json", "application/apply-patch+yaml"]
    precondition, operation = patches[0].body
    assert (precondition["path"], precondition["value"]) == ("/metadata/resourceVersion", version)
    assert (operation["path"], operation["value"][0]["manager"]) == ("/metadata/managedFields", "accelplane-operator")


async def test_an_error_of_the_server_is_reported_and_retried(api: KubeApi) -> None:
    refusing = api.fault("POST .*/daemonsets$", 422, times=1_000_000)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Degraded", "True"))
        refusing.times = 0
        await until(lambda: has_condition(api, "Degraded", "False") and daemonset(api) is not None)
        await until(lambda: any(each["reason"] == "WriteRejected" for each in api.all("events")))


async def test_a_malformed_resource_keeps_its_daemonset_and_is_reported(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        result = daemonset(api)
        assert result
        put_pod(api, result, "one", "node-a")
        await until(lambda: (api.get("gpudeviceplugins", "mine") or {})["status"].get("nodeNames") == ["node-a"])
        put(api, resource("gpu", image=IMAGE, sharedDevNum="many"), generation=2)
        await until(lambda: has_condition(api, "Degraded", "True"))
    degraded = condition(api, "Degraded") or {}
    assert (degraded["reason"], "sharedDevNum" in degraded["message"]) == ("Malformed", True)
    assert (api.get("gpudeviceplugins", "mine") or {})["status"]["nodeNames"] == ["node-a"]
    assert daemonset(api)


@pytest.mark.parametrize(("upgrade", "named"), [("spec", "0.31.1"), ("daemonset", "0.30.0"), ("off", "0.30.0")])
async def test_older_images_are_upgraded_as_the_option_selects(api: KubeApi, upgrade: Any, named: str) -> None:
    async with operator(api, "gpu", images=ImagePolicy(upgrade=upgrade)):
        put(api, resource("gpu", image="intel/intel-gpu-plugin:0.30.0"))
        await until(lambda: has_condition(api, "Available", "True"))
    runs = "0.30.0" if upgrade == "off" else "0.31.1"
    assert pod_spec(api)["containers"][0]["image"] == f"intel/intel-gpu-plugin:{runs}"
    found = api.get("gpudeviceplugins", "mine") or {}
    assert found["spec"]["image"] == f"intel/intel-gpu-plugin:{named}"
    assert has_condition(api, "ImageOverridden", str(upgrade == "daemonset"))


async def test_images_of_the_go_project_keep_running_and_the_conditions_name_the_ones_to_use(api: KubeApi) -> None:
    image = own_image("intel-gpu-plugin")
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE, allowIDs="0x56c0"))
        await until(
            lambda: has_condition(api, "OriginalImage", "True") and has_condition(api, "UnsupportedFields", "True")
        )
        assert pod_spec(api)["containers"][0]["image"] == IMAGE
        status = (api.get("gpudeviceplugins", "mine") or {})["status"]
        messages = {each["type"]: each["message"] for each in status["conditions"]}
        assert messages["OriginalImage"] == f"image is {IMAGE}, an image of the Go project; set image to {image}"
        assert messages["UnsupportedFields"].endswith(f"found '{IMAGE}'; set image to {image}")
        put(api, resource("gpu", image=image, allowIDs="0x56c0"), generation=2)
        await until(
            lambda: has_condition(api, "OriginalImage", "False") and has_condition(api, "UnsupportedFields", "False")
        )


async def test_pods_follow_the_content_of_the_config_map_and_no_other_is_watched(api: KubeApi) -> None:
    spec = {"image": "intel/intel-dsa-plugin:0.31.1", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}

    def hashed() -> str:
        found = daemonset(api, "dsa")
        metadata = found["spec"]["template"].get("metadata", {}) if found else {}
        return metadata.get("annotations", {}).get(PROVISIONING_ANNOTATION, "")

    def config(content: str) -> Object:
        return {"metadata": {"name": "layout", "namespace": NAMESPACE}, "data": {"dsa.conf": content}}

    async with operator(api, "dsa"):
        put(api, resource("dsa", **spec, provisioningConfig="layout"))
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "True", family="dsa"))
        api.put("configmaps", config("one"))
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "False", family="dsa") and hashed() != "")
        first = hashed()
        api.put("configmaps", config("two"))
        await until(lambda: hashed() not in ("", first))
        second = hashed()
        api.remove("configmaps", "layout", NAMESPACE)
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "True", family="dsa"))
        assert hashed() == second
    requests = [each for each in api.requests if each.path.endswith("/configmaps")]
    assert {each.parameters["fieldSelector"] for each in requests} == {"metadata.name=layout"}


async def test_without_rights_to_config_maps_the_plugin_is_deployed(api: KubeApi) -> None:
    refusing = api.fault("GET .*/configmaps", 403, times=1_000_000)
    spec = {"image": "intel/intel-dsa-plugin:0.31.1", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}
    api.put("configmaps", {"metadata": {"name": "layout", "namespace": NAMESPACE}, "data": {"dsa.conf": "x"}})

    def annotations() -> Object:
        found = daemonset(api, "dsa")
        return found["spec"]["template"].get("metadata", {}).get("annotations", {}) if found else {}

    async with operator(api, "dsa", wait=0.05):
        put(api, resource("dsa", **spec, provisioningConfig="layout"))
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "Unknown", family="dsa"))
        assert daemonset(api, "dsa")
        assert PROVISIONING_ANNOTATION not in annotations()
        refusing.times = 0
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "False", family="dsa"))
        assert PROVISIONING_ANNOTATION in annotations()


async def test_an_invalid_config_map_name_is_missing_without_a_request(api: KubeApi) -> None:
    async with operator(api, "dsa"):
        put(api, resource("dsa", image="intel/intel-dsa-plugin:0.31.1", provisioningConfig="a,metadata.name!=b"))
        await until(lambda: has_condition(api, "ProvisioningConfigMissing", "True", family="dsa"))
    assert not api.count("/configmaps")


@pytest.mark.parametrize("status", [0, 409, 410, 429, 500])
@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize(
    "pattern",
    [
        "POST .*/daemonsets$",
        "PATCH .*/status",
        "GET .*/daemonsets/",
        "GET .*/gpudeviceplugins/",
        "DELETE .*/daemonsets/",
    ],
)
async def test_a_fault_at_any_request_does_not_change_the_final_state(
    api: KubeApi, pattern: str, status: int, after: bool
) -> None:
    fault = api.fault(pattern, status, after=after)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: has_condition(api, "Available", "True"))
        assert not has_condition(api, "Degraded", "True")
        api.remove("gpudeviceplugins", "mine")
        await until(lambda: not api.all("daemonsets"))
    assert fault.times == 0
