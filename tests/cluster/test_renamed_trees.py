"""Trees with another prefix and namespace work on a real cluster: certificates, webhooks and rights are renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from customresources import resource
from manifests import overlay

from .cluster import Cluster
from .machine import wait_until
from .objects import Object, pod
from .trees import applied

pytestmark = pytest.mark.cluster

NOWHERE = {"example.com/nowhere": "true"}
OPERATED = "/apis/deviceplugin.intel.com/v1"
REGION = "ce48969398f05f33946d560708be108a"


def defaults_resources(cluster: Cluster, namespace: str) -> bool:
    """Whether the operator's webhooks complete a custom resource."""
    manifest = resource("npu", "wanted", nodeSelector=NOWHERE)
    status, answer = cluster.request("POST", f"{OPERATED}/npudeviceplugins?dryRun=All", manifest)
    return status == 201 and "image" in answer["spec"]


def serves_one_kind(cluster: Cluster, namespace: str) -> bool:
    """Whether a tree for GPUs completes their resources, and denies those of another kind with a message."""
    created = cluster.request(
        "POST", f"{OPERATED}/gpudeviceplugins?dryRun=All", resource("gpu", "x", nodeSelector=NOWHERE)
    )
    if created[0] != 201 or "image" not in created[1]["spec"]:
        return False
    status, answer = cluster.request("POST", f"{OPERATED}/npudeviceplugins?dryRun=All", resource("npu", "x"))
    assert status == 403, answer
    assert "NpuDevicePlugin is not enabled: add -devices=npu to the operator" in answer["message"]
    return True


def adds_enclaves(cluster: Cluster, namespace: str) -> bool:
    return "sgx.intel.com/enclave" in admitted_limits(cluster, namespace, {"sgx.intel.com/epc": "512Ki"})


def resolves_regions(cluster: Cluster, namespace: str) -> bool:
    name = {"metadata": {"name": "card"}, "apiVersion": "fpga.intel.com/v2", "kind": "FpgaRegion"}
    cluster.request(
        "POST",
        f"/apis/fpga.intel.com/v2/namespaces/{namespace}/fpgaregions",
        {**name, "spec": {"interfaceId": REGION}},
    )
    return f"fpga.intel.com/region-{REGION}" in admitted_limits(cluster, namespace, {"fpga.intel.com/card": "1"})


def admitted_limits(cluster: Cluster, namespace: str, resources: dict[str, str]) -> Object:
    manifest = pod("wanted", namespace=namespace, resources=resources)
    status, answer = cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", manifest)
    assert status in (201, 400, 403), answer
    return answer["spec"]["containers"][0]["resources"]["limits"] if status == 201 else {}


TREES: dict[str, Callable[[Cluster, str], bool]] = {
    "operator/default": defaults_resources,
    "operator/device/gpu": serves_one_kind,
    "fpga_admissionwebhook/default": resolves_regions,
    "sgx_admissionwebhook/overlays/default-with-own-certificates": adds_enclaves,
}


@pytest.mark.parametrize("tree", TREES)
def test_a_renamed_tree_becomes_available_and_serves_its_webhooks(
    image: None, cluster: Cluster, namespace: str, tree: str, tmp_path: Path
) -> None:
    elsewhere = f"{namespace}-webhooks"
    objects = overlay(tmp_path, resources=[f"deploy/{tree}"], namePrefix="x-", namespace=elsewhere)
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    path = f"/apis/apps/v1/namespaces/{elsewhere}/deployments/{deployment['metadata']['name']}"

    def is_available() -> bool:
        found: Any = cluster.get(path)
        return any(
            (each["type"], each["status"]) == ("Available", "True") for each in found["status"].get("conditions", ())
        )

    with applied(cluster, objects):
        hint = f"see kubectl --kubeconfig={cluster.kubeconfig} describe pods -n {elsewhere}"
        wait_until(is_available, f"{tree}: available", 240, hint=hint)
        wait_until(lambda: TREES[tree](cluster, namespace), f"{tree}: webhooks served", 60, hint=hint)
        logs = cluster.kubectl("logs", f"--namespace={elsewhere}", "--selector=control-plane=controller-manager")
        assert "forbidden" not in logs.lower(), logs
