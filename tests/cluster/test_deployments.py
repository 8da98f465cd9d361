"""A real API server accepts every tree and demo strictly, and has the Pod Security rules of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifests import DEPLOY, Object, overlay, render, trees
from podsecurity import ENFORCE, pod_template, violations

from .build import kubernetes_minor
from .cluster import Cluster
from .machine import REPOSITORY

pytestmark = pytest.mark.cluster

VALIDATED = ("--dry-run=server", "--validate=strict")
# The API server does not know the kinds of NFD, cert-manager, the Prometheus operator and the operators' samples. Trees
# with cert-manager, and those for Prometheus, are validated without these objects.
UNKNOWN = {"nfd", "samples", "certmanager", "manifests", "prometheus"}
TREES = [tree for tree in trees() if not UNKNOWN & {*tree.split("/")} and tree != "monitoring/base"]
# Pods that name a RuntimeClass are rejected without it.
KATA = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "kata-containers"},
    "handler": "kata",
}


@pytest.mark.by_turns
@pytest.mark.parametrize("tree", TREES)
def test_the_api_server_accepts_a_tree(cluster: Cluster, namespace: str, tree: str) -> None:
    if tree.endswith("/admission-policies") and kubernetes_minor() < 36:
        pytest.skip("MutatingAdmissionPolicy v1 needs Kubernetes 1.36: ACCELPLANE_KUBERNETES=1.37")
    if tree in ("dra", "dra/classes", "dra/extended-resources") and kubernetes_minor() < 34:
        pytest.skip("DeviceClass v1 needs Kubernetes 1.34: ACCELPLANE_KUBERNETES=1.37")
    others = ("cert-manager.io/", "monitoring.coreos.com/")
    objects = [each for each in render(DEPLOY / tree) if not each["apiVersion"].startswith(others)]
    # A dry run creates no namespace, not even that of the tree.
    own = {each["metadata"].get("namespace") for each in objects} - {None}
    for name in own:
        cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    words = [] if own else ["--namespace", namespace]
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    accepted = cluster.kubectl("apply", "--filename=-", *words, *VALIDATED, text=document)
    assert accepted.count("(server dry run)") == len(objects)


@pytest.mark.parametrize(
    "file",
    [
        "qat_plugin/base/intel-qat-kernel-plugin.yaml",
        "qat_dpdk_app/crypto-perf/crypto-perf-dpdk-pod-requesting-qat-generic.yaml",
        "qat_dpdk_app/compress-perf/compress-perf-dpdk-pod-requesting-qat-generic.yaml",
    ],
)
def test_the_api_server_accepts_files_beside_a_tree(cluster: Cluster, namespace: str, file: str) -> None:
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", DEPLOY / file, *words)


@pytest.mark.parametrize("demo", sorted((REPOSITORY / "demo").rglob("*.yaml")), ids=lambda demo: demo.name)
def test_the_api_server_accepts_a_demo(cluster: Cluster, namespace: str, demo: Path) -> None:
    cluster.apply(KATA)
    if demo.parent.name == "dra":
        if kubernetes_minor() < 34:
            pytest.skip("claims of v1 need Kubernetes 1.34: ACCELPLANE_KUBERNETES=1.37")
        cluster.kubectl("label", "namespace", namespace, "resource.kubernetes.io/admin-access=true")
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", demo, *words)


def pods() -> list[Object]:
    """The different pods of all trees, with the account that every namespace has."""
    found: dict[str, Object] = {}
    for tree in trees():
        for document in render(DEPLOY / tree):
            if template := pod_template(document):
                annotations = template.get("metadata", {}).get("annotations", {})
                spec = {**template["spec"], "serviceAccountName": "default"}
                pod = {"metadata": {"name": "pod", "annotations": annotations}, "spec": spec}
                found[json.dumps(pod, sort_keys=True)] = pod
    return [*found.values()]


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_the_api_server_rejects_the_pods_that_violate_a_pod_security_level(
    cluster: Cluster, namespace: str, level: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, f"{ENFORCE}={level}")
    cases = pods()
    assert len(cases) > 30
    accepted = 0
    for pod in cases:
        path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        status, answer = cluster.request("POST", path, {"apiVersion": "v1", "kind": "Pod", **pod})
        expected = violations(level, pod)
        assert status == (403 if expected else 201), (expected, answer)
        assert not expected or "violates PodSecurity" in answer["message"]
        accepted += status == 201
    assert 0 < accepted < len(cases)


def test_the_plugin_of_a_tree_is_admitted_to_the_namespace_of_its_webhook(cluster: Cluster, tmp_path: Path) -> None:
    objects = overlay(tmp_path, resources=["deploy/sgx_plugin/overlays/epc-nfd"], namespace="sgx-elsewhere")
    (own,) = (each for each in objects if each["kind"] == "Namespace")
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    assert own["metadata"]["name"] == daemonset["metadata"]["namespace"] == "sgx-elsewhere"
    with cluster.namespace("sgx-elsewhere"):
        labels: Any = own["metadata"]["labels"]
        cluster.kubectl("label", "namespace", "sgx-elsewhere", *(f"{name}={value}" for name, value in labels.items()))
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"},
            "spec": daemonset["spec"]["template"]["spec"],
        }
        status, answer = cluster.request("POST", "/api/v1/namespaces/sgx-elsewhere/pods?dryRun=All", pod)
        assert status == 201, answer
