"""Every kustomize tree, and every demo, is what a genuine API server takes for right, to the last field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manifests import render

from .cluster import Cluster
from .machine import REPOSITORY

pytestmark = pytest.mark.cluster

DEPLOY = REPOSITORY / "deploy"
VALIDATED = ("--dry-run=server", "--validate=strict")
# NFD's own tree lies elsewhere, and its rules are of a kind that comes with it; samples are of kinds of the operator.
# Those of cert-manager are not known here either, but trees that have some have much besides.
TREES = sorted(
    file.parent
    for file in DEPLOY.rglob("kustomization.yaml")
    if not {"nfd", "samples", "certmanager"} & {*file.relative_to(DEPLOY).parts}
)


# These say which namespace they are for, and some bring it.
IN_THEIR_OWN_NAMESPACE = (
    "fpga_admissionwebhook",
    "fpga_admissionwebhook/base",
    "fpga_admissionwebhook/default",
    "fpga_admissionwebhook/manager",
    "fpga_admissionwebhook/namespace",
    "fpga_admissionwebhook/overlays/default-with-certmanager",
    "fpga_admissionwebhook/overlays/default-with-own-certificates",
    "fpga_admissionwebhook/own-certificates",
    "fpga_admissionwebhook/rbac",
    "fpga_admissionwebhook/webhook",
    "fpga_plugin",
    "fpga_plugin/base",
    "fpga_plugin/overlays/af",
    "fpga_plugin/overlays/region",
    "fpga_plugin/overlays/regiondevel",
    "sgx_admissionwebhook",
    "sgx_admissionwebhook/base",
    "sgx_admissionwebhook/default",
    "sgx_admissionwebhook/manager",
    "sgx_admissionwebhook/overlays/default-with-certmanager",
    "sgx_admissionwebhook/overlays/default-with-own-certificates",
    "sgx_admissionwebhook/webhook",
    "sgx_plugin/overlays/epc-nfd",
    "sgx_plugin/overlays/epc-register",
    "labels",
    "labels/base",
    "labels/overlays/own-node-only",
)
# The API server wants to know this of pods that name it.
KATA = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "kata-containers"},
    "handler": "kata",
}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.relative_to(DEPLOY)))
def test_the_api_server_accepts_a_tree(cluster: Cluster, namespace: str, tree: Path) -> None:
    objects = [each for each in render(tree) if not each["apiVersion"].startswith("cert-manager.io/")]
    words = ["--namespace", namespace]
    if str(tree.relative_to(DEPLOY)) in IN_THEIR_OWN_NAMESPACE:
        words = []
        # In a dry run none that is among them comes to be.
        for name in {each["metadata"].get("namespace") for each in objects} - {None}:
            cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
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
def test_the_api_server_accepts_what_lies_beside_a_tree(cluster: Cluster, namespace: str, file: str) -> None:
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", DEPLOY / file, *words)


@pytest.mark.parametrize("demo", sorted((REPOSITORY / "demos").glob("*.yaml")), ids=lambda demo: demo.name)
def test_the_api_server_accepts_a_demo(cluster: Cluster, namespace: str, demo: Path) -> None:
    cluster.apply(KATA)
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", demo, *words)
