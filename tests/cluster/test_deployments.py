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
# NFD's own tree lies elsewhere, and its rules are of a kind that comes with it; samples are of kinds of the operator,
# and `manifests` has them; what leaves out a kind is no tree, nor is a component. Kinds of cert-manager are not known
# here either, but trees that have some have much besides.
TREES = sorted(
    file.parent
    for file in DEPLOY.rglob("kustomization.yaml")
    if not {"nfd", "samples", "certmanager", "manifests", "without", "components"} & {*file.relative_to(DEPLOY).parts}
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
    # Those that say which namespace they are for may bring it; in a dry run none comes to be.
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
def test_the_api_server_accepts_what_lies_beside_a_tree(cluster: Cluster, namespace: str, file: str) -> None:
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", DEPLOY / file, *words)


@pytest.mark.parametrize("demo", sorted((REPOSITORY / "demo").glob("*.yaml")), ids=lambda demo: demo.name)
def test_the_api_server_accepts_a_demo(cluster: Cluster, namespace: str, demo: Path) -> None:
    cluster.apply(KATA)
    words = ["--namespace", namespace, *VALIDATED]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", demo, *words)
