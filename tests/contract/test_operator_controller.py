"""The operator's controllers with the double of an API server."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from customresources import resource, sample
from kubeapi import KubeApi, Object
from manifests import own_image
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.operator import models
from accelplane.operator.controller import controllers
from accelplane.operator.daemonsets import PROVISIONING_ANNOTATION
from accelplane.operator.settings import ImagePolicy, Settings

pytestmark = pytest.mark.virtual_time

NAMESPACE = "plugins"
IMAGE = "intel/intel-gpu-plugin:0.31.1"


@contextlib.asynccontextmanager
async def operator(
    api: KubeApi, *families: str, images: ImagePolicy | None = None, wait: float = 10
) -> AsyncIterator[None]:
    """Runs the controllers of these families."""
    client = Client(api.config, field_manager="accelplane-operator", timeout=1)
    manager = Manager(
        client, health_address=OFF, metrics_address=OFF, watch_timeouts=WatchTimeouts(first_delay=0.01, max_delay=0.1)
    )
    controllers(manager, families, Settings(namespace=NAMESPACE, images=images or ImagePolicy()), wait=wait)
    task = asyncio.create_task(manager.run())
    try:
        yield
        assert not task.done()
        manager.stop()
        async with asyncio.timeout(5):
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def put(api: KubeApi, thing: Object, *, generation: int = 1) -> Object:
    """Applies a custom resource."""
    thing["metadata"]["generation"] = generation
    return api.put(f"{thing['kind'].lower()}s", thing)


def daemonset(api: KubeApi, family: str = "gpu", name: str = "mine") -> Object | None:
    return api.get("daemonsets", f"intel-{family}-plugin-{name}", NAMESPACE)


def pod_spec(api: KubeApi, family: str = "gpu", name: str = "mine") -> Any:
    found = daemonset(api, family, name)
    assert found
    return found["spec"]["template"]["spec"]


def condition(api: KubeApi, kind: str, family: str = "gpu", name: str = "mine") -> Object | None:
    found = api.get(f"{family}deviceplugins", name) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), None)


def has_condition(api: KubeApi, kind: str, status: str, **where: str) -> bool:
    found = condition(api, kind, **where)
    return found is not None and found["status"] == status


def node(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **labels}}}


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
        await until(lambda: api.count("DELETE .*gpu-manager-sa") == 2)
    assert api.count("^(PATCH|POST|PUT)") == writes


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


async def test_two_resources_on_the_same_nodes_report_their_overlap(api: KubeApi) -> None:
    api.put("nodes", node("one", gpu="yes"))
    async with operator(api, "gpu"):
        put(api, resource("gpu", "a", image=IMAGE))
        put(api, resource("gpu", "b", image=IMAGE, nodeSelector={"gpu": "yes"}))
        await until(lambda: all(has_condition(api, "NodeOverlap", "True", name=name) for name in ("a", "b")))
        api.put("nodes", node("one"))
        await until(lambda: all(has_condition(api, "NodeOverlap", "False", name=name) for name in ("a", "b")))


async def test_recreating_a_resource_notifies_overlapping_resources(api: KubeApi) -> None:
    api.put("nodes", node("one", gpu="yes"))
    async with operator(api, "gpu"):
        put(api, resource("gpu", "a", image=IMAGE))
        put(api, resource("gpu", "b", image=IMAGE, nodeSelector={"gpu": "yes"}))
        await until(lambda: all(has_condition(api, "NodeOverlap", "True", name=name) for name in ("a", "b")))
        api.remove("gpudeviceplugins", "b")
        put(api, resource("gpu", "b", image=IMAGE, nodeSelector={"gpu": "no"}))
        api.compact()
        api.abort_watches()
        await until(lambda: has_condition(api, "NodeOverlap", "False", name="a"))


async def test_shared_objects_of_gpu_plugins_exist_while_one_of_them_needs_them(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE, resourceManager=True, sharedDevNum=2))
        await until(lambda: daemonset(api) is not None)
        binding = api.get("clusterrolebindings", "gpu-manager-rolebinding")
        assert binding
        assert binding["roleRef"]["name"] == "inteldeviceplugins-gpu-manager-role"
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "gpu-manager-sa", "namespace": NAMESPACE}]
        assert api.get("serviceaccounts", "gpu-manager-sa", NAMESPACE)
        put(api, resource("gpu", image=IMAGE), generation=2)
        await until(lambda: not api.all("clusterrolebindings") and not api.all("serviceaccounts"))


def binding(namespace: str = NAMESPACE, role: str = "inteldeviceplugins-gpu-manager-role", **more: Any) -> Object:
    subject = {"kind": "ServiceAccount", "name": "gpu-manager-sa", "namespace": namespace}
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "gpu-manager-rolebinding"},
        "roleRef": {"kind": "ClusterRole", "name": role, "apiGroup": "rbac.authorization.k8s.io"},
        "subjects": [subject],
        **more,
    }


@pytest.mark.parametrize(
    "found",
    [
        binding("default"),
        binding(role="other-gpu-manager-role"),
        binding(subjects=[{"kind": "User", "name": "gpu-manager-sa", "apiGroup": "rbac.authorization.k8s.io"}]),
        binding(subjects=None),
    ],
    ids=["namespace", "role", "user", "nobody"],
)
async def test_a_binding_of_another_installation_is_replaced(api: KubeApi, found: Object) -> None:
    api.put("clusterrolebindings", found)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), resourceManager=True, sharedDevNum=2))
        await until(lambda: daemonset(api) is not None)
        existing = api.get("clusterrolebindings", "gpu-manager-rolebinding")
        assert existing
        assert {key: existing[key] for key in ("roleRef", "subjects")} == {
            key: binding()[key] for key in ("roleRef", "subjects")
        }


async def test_with_the_rights_of_older_manifests_a_binding_is_not_verified(api: KubeApi) -> None:
    api.put("clusterrolebindings", binding())
    api.fault("GET .*/clusterrolebindings/", 403, times=1_000_000)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), resourceManager=True, sharedDevNum=2))
        await until(lambda: daemonset(api) is not None)
        assert not has_condition(api, "Degraded", "True")


async def test_a_binding_with_further_accounts_is_unchanged(api: KubeApi) -> None:
    others = {"kind": "Group", "name": "readers", "apiGroup": "rbac.authorization.k8s.io"}
    api.put("clusterrolebindings", binding(subjects=[others, *binding()["subjects"]]))
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), resourceManager=True, sharedDevNum=2))
        await until(lambda: daemonset(api) is not None)
    assert api.count("DELETE .*clusterrolebindings") == 0
    assert others in (api.get("clusterrolebindings", "gpu-manager-rolebinding") or {})["subjects"]


async def test_shared_gpu_objects_that_may_not_be_created_are_reported(api: KubeApi) -> None:
    refusing = api.fault("POST .*/serviceaccounts", 403, times=1_000_000)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE, resourceManager=True, sharedDevNum=2))
        await until(lambda: has_condition(api, "Degraded", "True"))
        assert "serviceaccounts" in (condition(api, "Degraded") or {})["message"]
        refusing.times = 0
        await until(lambda: has_condition(api, "Degraded", "False") and daemonset(api) is not None)


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
