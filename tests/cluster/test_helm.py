"""Helm on a real API server: install, upgrade, rollback and uninstall of releases; nothing unexpected remains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from charts import CHARTS, OPERATOR, parent_chart, template
from manifests import DEPLOY, Object

from .cluster import Cluster
from .releases import Helm, runner, succeed

pytestmark = pytest.mark.cluster

CRD = DEPLOY / "operator" / "crd"
GPU = "/apis/deviceplugin.intel.com/v1/gpudeviceplugins/mine"
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpudeviceplugins.deviceplugin.intel.com"


@pytest.fixture
def run(cluster: Cluster, namespace: str, tmp_path: Path) -> Helm:
    return runner(cluster, namespace, tmp_path)


@pytest.fixture
def old_definitions(cluster: Cluster) -> Iterator[None]:
    """The definitions as another release has installed them: not of Helm, and one with another description."""
    cluster.kubectl("apply", "--server-side", "--kustomize", CRD)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRD / "bases")
    old = [{"op": "add", "path": "/spec/versions/0/schema/openAPIV3Schema/description", "value": "old"}]
    cluster.kubectl("patch", "customresourcedefinition", "gpudeviceplugins.deviceplugin.intel.com",
                    "--type=json", f"--patch={json.dumps(old)}")  # fmt: skip
    yield
    cluster.kubectl("delete", "--ignore-not-found", "--kustomize", CRD)


def spec(cluster: Cluster) -> Object:
    found = cluster.get(GPU)
    assert found
    return found["spec"]


def test_a_plugin_release_is_installed_upgraded_rolled_back_and_uninstalled(
    cluster: Cluster, run: Helm, old_definitions: None
) -> None:
    chart, values = CHARTS / "intel-device-plugins-gpu", ("--set", "name=mine,nodeFeatureRule=false")
    notes = succeed(run("install", "gpu", chart, *values))
    assert "kubectl describe gpudeviceplugin mine" in notes
    assert spec(cluster)["sharedDevNum"] == 1
    succeed(run("upgrade", "gpu", chart, *values, "--set", "sharedDevNum=5,logLevel=4"))
    assert (spec(cluster)["sharedDevNum"], spec(cluster)["logLevel"]) == (5, 4)
    succeed(run("rollback", "gpu", "1"))
    assert (spec(cluster)["sharedDevNum"], spec(cluster)["logLevel"]) == (1, 2)
    succeed(run("uninstall", "gpu"))
    assert cluster.get(GPU) is None


def test_the_operator_release_adopts_and_upgrades_definitions_and_leaves_only_them(
    cluster: Cluster, run: Helm, namespace: str, old_definitions: None
) -> None:
    refused = run("install", "operator", CHARTS / OPERATOR)
    assert refused.returncode != 0
    assert "invalid ownership metadata" in refused.stderr

    succeed(run("install", "operator", CHARTS / OPERATOR, "--take-ownership"))
    expected = {(each["kind"], each["metadata"]["name"]) for each in template(OPERATOR, namespace)}
    live = cluster.kubectl("get", "--ignore-not-found", "--output=json", "--filename=-",
                           text=succeed(run("get", "manifest", "operator")))  # fmt: skip
    assert {(each["kind"], each["metadata"]["name"]) for each in json.loads(live)["items"]} == expected
    definition = cluster.get(DEFINITION)
    assert definition
    assert definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] != "old"

    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/inteldeviceplugins-controller-manager"

    def arguments() -> list[str]:
        found = cluster.get(deployment)
        assert found
        return found["spec"]["template"]["spec"]["containers"][0]["args"]

    succeed(run("upgrade", "operator", CHARTS / OPERATOR, "--set", "manager.devices.gpu=true"))
    assert "--devices=gpu" in arguments()
    succeed(run("rollback", "operator", "1"))
    assert "--devices=gpu" not in arguments()

    succeed(run("uninstall", "operator"))
    remaining = cluster.kubectl("get", "--ignore-not-found", "--output=json", "--filename=-",
                                text=json.dumps({"apiVersion": "v1", "kind": "List",
                                                 "items": template(OPERATOR, namespace)}))  # fmt: skip
    assert {each["kind"] for each in json.loads(remaining)["items"]} == {"CustomResourceDefinition"}
    succeed(run("install", "operator", CHARTS / OPERATOR))
    succeed(run("uninstall", "operator"))


def test_a_parent_chart_installs_the_operator_and_a_resource_in_one_release(
    image: None, cluster: Cluster, run: Helm, namespace: str, tmp_path: Path
) -> None:
    gpu, qat = (f"intel-device-plugins-{family}" for family in ("gpu", "qat"))
    chart = parent_chart(tmp_path / "parent", OPERATOR, gpu, qat)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    sets = f"{gpu}.fullnameOverride=mine,{gpu}.nodeFeatureRule=false,{qat}.enabled=false,{OPERATOR}.crds.keep=false"
    words = ("parent", chart, "--set", sets, "--wait", "--timeout=4m")

    succeed(run("install", *words))
    assert spec(cluster)["sharedDevNum"] == 1
    assert not cluster.get(GPU.replace("gpudeviceplugins/mine", "qatdeviceplugins"))["items"]  # type: ignore[index]

    succeed(run("upgrade", *words, "--set", f"{gpu}.sharedDevNum=5"))
    assert spec(cluster)["sharedDevNum"] == 5
    assert "kind: GpuDevicePlugin" in succeed(run("get", "manifest", "parent"))
    # The resource of the first revision is a hook, which is deleted as well.
    succeed(run("rollback", "parent", "1", "--wait"))
    assert spec(cluster)["sharedDevNum"] == 1
    succeed(run("uninstall", "parent", "--wait"))
    assert cluster.get(GPU) is None
    assert cluster.get(DEFINITION) is None
