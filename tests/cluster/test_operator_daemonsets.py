"""A real API server accepts rendered DaemonSets, and the stored objects have no differences."""

from __future__ import annotations

import json
from typing import Any

import pytest
from customresources import plugin
from daemonsetplans import plan

from accelplane.kube.fieldmanagers import transfer_fields
from accelplane.operator import models
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import Settings
from accelplane.operator.update import GO_MANAGERS

from .build import ClusterError
from .cluster import Cluster
from .machine import wait_until

pytestmark = pytest.mark.cluster

MANAGER = "accelplane-operator"
REGISTRY = "registry-of-all"
# No pods: only the objects are tested.
NOWHERE = {"nodeSelector": {"example.com/nowhere": "true"}}
OWN: dict[str, dict[str, Any]] = {
    "dlb": {"initImage": "intel/intel-dlb-initcontainer:0.31.1"},
    "dsa": {"initImage": "intel/intel-idxd-config-initcontainer:0.31.1", "provisioningConfig": "mine"},
    "fpga": {},
    "generic": {"domain": "a.example", "cdi": "all"},
    "gpu": {
        "initImage": "intel/intel-gpu-initcontainer:0.31.1",
        "resourceManager": True,
        "healthManagement": True,
        "sharedDevNum": 2,
    },
    "iaa": {"initImage": "intel/intel-idxd-config-initcontainer:0.31.1", "provisioningConfig": "mine"},
    "npu": {},
    "qat": {"initImage": "intel/intel-qat-initcontainer:0.31.1", "provisioningConfig": "mine"},
    "sgx": {"initImage": "intel/intel-sgx-initcontainer:0.31.1"},
}
FOR_ALL: dict[str, Any] = {
    "resources": {"limits": {"cpu": 1, "memory": "0.5Gi", "example.com/a.b": "2"}, "requests": {"cpu": "0.1"}},
    "tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}, {"key": "a", "value": "b"}],
    "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
    "imagePullSecrets": [{"name": "registry"}],
    "imagePullPolicy": "Always",
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"example.com/a": "b"},
}


def path(namespace: str, name: str = "") -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}".rstrip("/")


def applied(cluster: Cluster, daemonset: dict[str, Any]) -> dict[str, Any]:
    words = ("apply", "--server-side", "--force-conflicts", f"--field-manager={MANAGER}", "--filename=-")
    cluster.kubectl(*words, "--validate=strict", text=json.dumps(daemonset))
    return found(cluster, daemonset["metadata"]["namespace"], daemonset["metadata"]["name"])


def found(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    existing = cluster.get(path(namespace, name))
    assert existing is not None
    return existing


@pytest.mark.parametrize("more", [{}, FOR_ALL], ids=["plain", "with everything"])
@pytest.mark.parametrize("family", models.KINDS)
def test_a_repeated_apply_writes_nothing(cluster: Cluster, namespace: str, family: str, more: dict[str, Any]) -> None:
    settings = Settings(namespace=namespace, pull_secret=REGISTRY, service_account="plugins")
    resource = plugin(family, **OWN[family], **NOWHERE, **more)
    desired = render(resource, settings, provisioning="0123")
    first = plan(desired, [])
    assert first.current is None
    assert first.apply is not None
    existing = applied(cluster, first.apply)
    again = plan(desired, [existing])
    assert (again.apply, again.differences) == (None, ())


def test_fields_no_longer_desired_are_removed_and_fields_of_others_stay(cluster: Cluster, namespace: str) -> None:
    settings = Settings(namespace=namespace)
    before = render(plugin("gpu", **OWN["gpu"], **NOWHERE, **FOR_ALL), settings)
    existing = applied(cluster, plan(before, []).apply or {})
    name = existing["metadata"]["name"]
    cluster.kubectl("rollout", "restart", f"--namespace={namespace}", f"daemonset/{name}")

    after = render(plugin("gpu", **NOWHERE), settings)
    changed = plan(after, [found(cluster, namespace, name)])
    existing = applied(cluster, changed.apply or {})

    pod = existing["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert [each["name"] for each in pod["containers"]] == ["intel-gpu-plugin"]
    assert [each["name"] for each in pod["volumes"]] == ["devfs", "sysfsdrm", "kubeletsockets", "cdipath"]
    assert pod["serviceAccountName"] == "default"
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "100m", "memory": "90Mi"}
    assert not {"tolerations", "priorityClassName", "imagePullSecrets"} & set(pod)
    assert [*existing["spec"]["template"]["metadata"]["annotations"]] == ["kubectl.kubernetes.io/restartedAt"]
    assert plan(after, [existing]).apply is None


def test_objects_of_an_older_operator_are_adopted(cluster: Cluster, namespace: str) -> None:
    settings = Settings(namespace=namespace)
    old = render(plugin("sgx", **OWN["sgx"], **NOWHERE), settings).as_object()
    name = "intel-sgx-plugin"
    result = old | {"metadata": {"name": name, "namespace": namespace, "labels": {"app": name}}}
    words = ("create", "--field-manager=intel_deviceplugin_operator", "--filename=-")
    cluster.kubectl(*words, text=json.dumps(result))

    desired = render(plugin("sgx", **NOWHERE), settings)
    # The DaemonSet controller writes the status once, as another manager.
    wait_until(lambda: found(cluster, namespace, name)["status"].get("observedGeneration"), f"status of {name}")
    before = found(cluster, namespace, name)
    takeover = plan(desired, [before])
    managed_fields = transfer_fields(before["metadata"]["managedFields"], MANAGER, GO_MANAGERS)
    assert managed_fields
    words = ("patch", "daemonset", name, f"--namespace={namespace}", "--type=json", f"--field-manager={MANAGER}")

    def transfer(version: str) -> None:
        values = {"resourceVersion": version, "managedFields": managed_fields}
        patch = [{"op": "replace", "path": f"/metadata/{field}", "value": value} for field, value in values.items()]
        cluster.kubectl(*words, "--patch", json.dumps(patch))

    with pytest.raises(ClusterError, match="the object has been modified"):
        transfer("1")
    transfer(before["metadata"]["resourceVersion"])
    existing = applied(cluster, takeover.apply or {})

    assert existing["metadata"]["name"] == name
    assert "initContainers" not in existing["spec"]["template"]["spec"]
    assert "nfd-features" not in [each["name"] for each in existing["spec"]["template"]["spec"]["volumes"]]
    owners = {(each["manager"], each["operation"]) for each in existing["metadata"]["managedFields"]}
    assert ("intel_deviceplugin_operator", "Update") not in owners
    assert plan(desired, [existing]).apply is None
    assert len((cluster.get(path(namespace)) or {})["items"]) == 1
