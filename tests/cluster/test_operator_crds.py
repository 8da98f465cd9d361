"""A genuine API server takes the operator's definitions, the originals' samples, and refuses what it is to refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster import Cluster
from .machine import REPOSITORY

pytestmark = pytest.mark.cluster

OPERATOR = REPOSITORY / "deploy" / "operator"
DRY_RUN = ("--dry-run=server", "--validate=strict")
INIT = {"initImage": "intel/intel-qat-initcontainer:0.31.1"}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> Iterator[None]:
    """The operator's definitions in the cluster, for the tests of this file."""
    cluster.kubectl("apply", "--server-side", "--kustomize", OPERATOR / "crd")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", OPERATOR / "crd/bases")
    yield
    cluster.kubectl("delete", "--kustomize", OPERATOR / "crd")


def refused(cluster: Cluster, kind: str, spec: dict[str, Any]) -> str:
    """What the API server says to a resource; empty when it takes it."""
    plural = f"{kind.lower()}deviceplugins"
    resource = {
        "apiVersion": "deviceplugin.intel.com/v1",
        "kind": f"{kind}DevicePlugin",
        "metadata": {"name": "tried"},
        "spec": spec,
    }
    status, answer = cluster.request("POST", f"/apis/deviceplugin.intel.com/v1/{plural}?dryRun=All", resource)
    return "" if status == 201 else json.dumps(answer["message"], ensure_ascii=False)


def test_no_definition_is_found_fault_with(cluster: Cluster, definitions: None) -> None:
    listed = json.loads(cluster.kubectl("get", "--filename", OPERATOR / "crd/bases", "--output=json"))["items"]
    assert len(listed) == 10
    for definition in listed:
        conditions = {each["type"]: each for each in definition["status"]["conditions"]}
        assert conditions["Established"]["status"] == "True"
        assert "NonStructuralSchema" not in conditions, conditions["NonStructuralSchema"]["message"]


def test_the_samples_apply(cluster: Cluster, definitions: None, namespace: str) -> None:
    samples = cluster.kubectl("apply", "--kustomize", OPERATOR / "samples", *DRY_RUN)
    assert samples.count("created (server dry run)") == 8
    mappings = OPERATOR / "samples" / "mappings-collection.yaml"
    applied = cluster.kubectl("apply", "--namespace", namespace, "--filename", mappings, *DRY_RUN)
    assert applied.count("created (server dry run)") == 21


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("Gpu", {"sharedDevNum": 0}, "greater than or equal to 1"),
        ("Gpu", {"preferredAllocationPolicy": "most"}, "supported values"),
        (
            "Gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "packed"},
            "preferredAllocationPolicy is packed and sharedDevNum is 1, expected none or sharedDevNum above 1",
        ),
        ("Gpu", {"sharedDevNum": 1, "resourceManager": True}, "resourceManager is true and sharedDevNum is 1"),
        ("Gpu", {"allowIDs": "0x56c0,0x56C1"}, "0x56c0,0x56C1"),
        ("Gpu", {"denyIDs": "0x56c0,"}, "expected PCI device ids like 0x56c0,0x56c1"),
        ("Gpu", {"allowIDs": "0x56c0", "denyIDs": "0x56c1"}, "allowIDs is 0x56c0 and denyIDs is 0x56c1"),
        ("Gpu", {"healthManagement": True, "xpumdEndpoint": "/run/xpumd/a.sock"}, "expected one of them or none"),
        (
            "Dsa", {"provisioningConfig": "mine"},
            "provisioningConfig is mine and initImage is empty, expected an image of intel-idxd-config-initcontainer",
        ),
        ("Iaa", {"provisioningConfig": "mine", "initImage": ""}, "provisioningConfig is mine and initImage is empty"),
        ("Qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["4xxxvf"]}, "initImage is empty"),
        (
            "Qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c6xxvf", "d15xxvf"], **INIT},
            "kernelVfDrivers is c6xxvf,d15xxvf, expected one of 4xxxvf, 420xxvf, 6xxxvf in it",
        ),
        ("Qat", {"provisioningConfig": "mine", **INIT}, "kernelVfDrivers is empty"),
        ("Npu", {"resources": {"limits": {"cpu": "much"}}}, "should match"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_without_a_webhook(
    cluster: Cluster, definitions: None, kind: str, spec: dict[str, Any], message: str
) -> None:
    assert message in refused(cluster, kind, spec)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Gpu", {"sharedDevNum": 1}),
        ("Gpu", {"preferredAllocationPolicy": "packed"}),
        ("Gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "none", "allowIDs": "0x56c0,0x56c1", "denyIDs": ""}),
        ("Gpu", {"sharedDevNum": 2, "preferredAllocationPolicy": "balanced", "resourceManager": True}),
        ("Dsa", {"provisioningConfig": "mine", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}),
        ("Dsa", {"provisioningConfig": ""}),
        ("Qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c6xxvf", "6xxxvf"], **INIT}),
        (
            "Npu",
            {
                "resources": {"limits": {"cpu": 1, "memory": "0.5Gi"}, "requests": {"cpu": "100m"}},
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
                "imagePullSecrets": [{"name": "registry"}],
                "imagePullPolicy": "Always",
                "priorityClassName": "system-node-critical",
                "podAnnotations": {"example.com/a": "b"},
                "tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
            },
        ),
        ("Sgx", {}),
    ],
)
def test_what_is_right_is_taken(cluster: Cluster, definitions: None, kind: str, spec: dict[str, Any]) -> None:
    assert refused(cluster, kind, spec) == ""


def test_a_status_needs_both_numbers_and_takes_conditions(cluster: Cluster, definitions: None) -> None:
    cluster.kubectl("apply", "--filename", OPERATOR / "samples" / "deviceplugin_v1_dsadeviceplugin.yaml")
    words = ("patch", "dsadeviceplugin", "dsadeviceplugin-sample", "--subresource=status", "--type=merge", "--patch")
    path = "/apis/deviceplugin.intel.com/v1/dsadeviceplugins/dsadeviceplugin-sample"
    made = cluster.get(path)
    assert made is not None
    assert made["spec"]["driver"] == "idxd"
    status, answer = cluster.request("PUT", f"{path}/status", made | {"status": {"nodeNames": ["a"]}})
    assert (status, answer["message"].count("Required value")) == (422, 2)
    condition = {
        "type": "Available",
        "status": "True",
        "reason": "PodsReady",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    status = {"desiredNumberScheduled": 2, "numberReady": 0, "conditions": [condition]}
    cluster.kubectl(*words, json.dumps({"status": status}))
    columns = cluster.kubectl("get", "dsadeviceplugins").splitlines()
    assert columns[0].split() == ["NAME", "DESIRED", "READY", "NODE", "SELECTOR", "AGE"]
    assert columns[1].split()[1:3] == ["2", "0"]
