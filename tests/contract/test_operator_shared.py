"""Objects that the GPU plugins of an operator share, and overlaps of resources."""

import asyncio
from typing import Any

import pytest
from customresources import resource
from kubeapi import KubeApi, Object
from manifests import own_image
from pluginoperators import IMAGE, NAMESPACE, condition, daemonset, has_condition, operator, put
from waiting import until

pytestmark = pytest.mark.virtual_time


def node(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **labels}}}


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


def dra_bindings(api: KubeApi) -> dict[str, tuple[str, str]]:
    """Binding -> role and account."""
    return {
        each["metadata"]["name"]: (each["roleRef"]["name"], each["subjects"][0]["name"])
        for each in api.all("clusterrolebindings")
    }


async def test_accounts_for_claims_have_the_roles_that_a_resource_needs_and_exist_while_it_does(api: KubeApi) -> None:
    plain, status = "accelplane-dra-npu", "accelplane-dra-npu-status"
    image = own_image("intel-npu-plugin")
    async with operator(api, "npu", "qat", dra=True):
        put(api, resource("npu", image=image, dra={}))
        await until(lambda: daemonset(api, "npu") is not None)
        assert dra_bindings(api) == {plain: ("x-dra-role", plain), f"{plain}-drivers": (f"{plain}-drivers", plain)}
        assert api.get("serviceaccounts", plain, NAMESPACE)
        put(api, resource("npu", image=image, dra={"deviceStatus": True}), generation=2)
        bindings = {status: ("x-dra-status-role", status), f"{status}-drivers": (f"{status}-drivers", status)}
        await until(lambda: dra_bindings(api) == bindings)
        assert [each["metadata"]["name"] for each in api.all("serviceaccounts")] == [status]
        put(api, resource("npu", image=image, dra={"api": "none"}), generation=3)
        await until(lambda: not api.all("clusterrolebindings") and not api.all("serviceaccounts"))
        assert api.all("clusterroles") == []


def publishable(api: KubeApi, account: str) -> dict[str, list[str]]:
    """The drivers by resource and verb in the role that the operator writes for an account."""
    rules = (api.get("clusterroles", f"{account}-drivers") or {}).get("rules", ())
    return {f"{each['resources'][0]} {each['verbs'][0]}": each["resourceNames"] for each in rules}


async def test_an_account_may_publish_the_drivers_of_its_resources_and_no_others(api: KubeApi) -> None:
    image = own_image("intel-generic-plugin")

    def put_generic(name: str, domain: str, generation: int = 1, **dra: Any) -> None:
        devices = [{"name": "kvm", "groups": [{"paths": [{"path": "/dev/kvm"}]}]}]
        put(api, resource("generic", name, image=image, domain=domain, devices=devices, dra=dra), generation=generation)

    plain, status, publish = "accelplane-dra-generic", "accelplane-dra-generic-status", "resourceslices/driver publish"
    async with operator(api, "generic", "gpu", dra=True):
        put_generic("a", "")
        put_generic("b", "b.example.com")
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), dra={}))
        await until(lambda: publishable(api, plain) == {publish: ["b.example.com", "squat.ai"]})
        await until(lambda: publishable(api, "accelplane-dra-gpu") == {publish: ["gpu.intel.com"]})
        put_generic("b", "c.example.com", 2)
        await until(lambda: publishable(api, plain) == {publish: ["c.example.com", "squat.ai"]})
        put_generic("b", "c.example.com", 3, deviceStatus=True)
        await until(lambda: publishable(api, plain) == {publish: ["squat.ai"]})
        await until(
            lambda: (
                publishable(api, status)
                == {publish: ["c.example.com"], "resourceclaims/driver associated-node:update": ["c.example.com"]}
            )
        )


async def test_the_drivers_of_a_resource_that_cannot_be_read_stay(api: KubeApi) -> None:
    account = "accelplane-dra-npu"
    role = {
        "metadata": {"name": f"{account}-drivers"},
        "rules": [{"resources": ["a"], "resourceNames": ["old.example.com"], "verbs": ["b"]}],
    }
    async with operator(api, "npu", dra=True):
        put(api, resource("npu", "bad", image=3, dra={}))
        api.put("clusterroles", role)
        put(api, resource("npu", image=own_image("intel-npu-plugin"), dra={}))
        await until(lambda: [*publishable(api, account).values()] == [["npu.intel.com", "old.example.com"]])


async def test_a_resource_for_claims_is_degraded_if_the_operator_may_not_grant_the_rights(api: KubeApi) -> None:
    async with operator(api, "npu"):
        put(api, resource("npu", image=own_image("intel-npu-plugin"), dra={}))
        await until(lambda: has_condition(api, "Degraded", "True", family="npu"))
        found = condition(api, "Degraded", family="npu")
        assert found
        assert found["reason"] == "RightsMissing"
        assert "deploy/operator/overlays/dra" in found["message"]
        assert daemonset(api, "npu") is None
        put(api, resource("npu", image=own_image("intel-npu-plugin")), generation=2)
        await until(lambda: daemonset(api, "npu") is not None)


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
async def test_a_binding_of_another_installation_is_reported_and_not_changed(api: KubeApi, found: Object) -> None:
    """The overlay fractional_resources has a binding of this name, too."""
    api.put("clusterrolebindings", found)
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=own_image("intel-gpu-plugin"), resourceManager=True, sharedDevNum=2))
        await until(lambda: has_condition(api, "Degraded", "True"))
        degraded = condition(api, "Degraded") or {}
        assert degraded["reason"] == "BindingConflict"
        assert degraded["message"].startswith("ClusterRoleBinding gpu-manager-rolebinding: found role ")
        assert degraded["message"].endswith(
            f"expected role inteldeviceplugins-gpu-manager-role for ServiceAccount {NAMESPACE}/gpu-manager-sa; "
            "delete it if nothing else uses it"
        )
        await asyncio.sleep(100)
        assert api.count("(DELETE|POST|PATCH) .*/clusterrolebindings") == 0
        api.remove("clusterrolebindings", "gpu-manager-rolebinding")
        await until(lambda: has_condition(api, "Available", "True"), 60)
        assert daemonset(api)


async def test_shared_objects_that_another_program_deletes_are_created_again(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE, resourceManager=True, sharedDevNum=2))
        await until(lambda: has_condition(api, "Available", "True"))
        api.remove("clusterrolebindings", "gpu-manager-rolebinding")
        api.remove("serviceaccounts", "gpu-manager-sa", NAMESPACE)
        await until(lambda: bool(api.all("clusterrolebindings") and api.all("serviceaccounts")), 700)


@pytest.mark.parametrize(
    "found",
    [
        binding("default"),
        binding(role="gpu-manager-role"),
        binding(subjects=[{"kind": "Group", "name": "readers", "apiGroup": "rbac.authorization.k8s.io"}]),
    ],
    ids=["namespace", "role", "group"],
)
async def test_a_binding_that_is_not_the_operators_is_not_deleted(api: KubeApi, found: Object) -> None:
    """The overlay fractional_resources has a binding of this name, too."""
    api.put("clusterrolebindings", found)
    api.put("serviceaccounts", {"metadata": {"name": "gpu-manager-sa", "namespace": NAMESPACE}})
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE))
        await until(lambda: daemonset(api) is not None and api.count("GET .*/clusterrolebindings/") > 0)
        await until(lambda: has_condition(api, "Degraded", "False"))
    assert api.count("DELETE .*") == 0
    assert api.get("clusterrolebindings", "gpu-manager-rolebinding")


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


async def test_shared_gpu_objects_that_exist_are_not_created_again(api: KubeApi) -> None:
    async with operator(api, "gpu"):
        put(api, resource("gpu", image=IMAGE, resourceManager=True, sharedDevNum=2))
        await until(lambda: has_condition(api, "Available", "True"))
        put(api, resource("gpu", image=IMAGE, resourceManager=True, sharedDevNum=3), generation=2)
        await until(lambda: api.count("PATCH .*/daemonsets/") > 0)
    assert api.count("POST .*/(serviceaccounts|clusterrolebindings)$") == 2
