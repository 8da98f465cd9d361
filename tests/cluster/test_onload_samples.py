"""The samples of the Onload operator: each overlay is applied unchanged, and becomes ready on a kwok node."""

from __future__ import annotations

import http
from collections.abc import Iterator
from typing import Any

import pytest

from .machine import wait_until
from .objects import Object
from .onload_lab import TREE, Lab, running_lab

pytestmark = pytest.mark.cluster

SAMPLES = TREE / "config" / "samples"
OVERLAYS = SAMPLES / "onload" / "overlays"
NODE = "worker-0"
KERNEL = "4.18.0-372.49.1.el8_6.x86_64"
LABELS = {"node-role.kubernetes.io/worker": "", "feature.node.kubernetes.io/pci-1924.present": "true"}
RESOURCE = "/apis/onload.amd.com/v1alpha1/namespaces/default/onloads/onload"
MODULES = "/apis/kmm.sigs.x-k8s.io/v1beta1/namespaces/default/modules"
REGISTRY = "image-registry.openshift-image-registry.svc:5000/onload-clusterlocal"


@pytest.fixture(scope="module", params=[1, 2], ids=["KMM 1.1", "KMM 2"])
def lab(
    cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """One node with the kernel of the samples, an operator, and KMM with its webhook."""
    with running_lab(tmp_path_factory.mktemp("onload-samples"), request.param, nodes=0) as instance:
        instance.cluster.add_kwok_nodes(1, prefix="worker", labels=LABELS)
        change = {"status": {"nodeInfo": {"kernelVersion": KERNEL}}}
        code, answer = instance.cluster.request(
            "PATCH", f"/api/v1/nodes/{NODE}/status", change, content="application/strategic-merge-patch+json"
        )
        assert code == http.HTTPStatus.OK, answer
        instance.kmm.enable_webhook()
        with instance.operator():
            yield instance


@pytest.mark.parametrize(
    ("overlay", "modules", "image"),
    [
        ("in-cluster-build-ocp", {"onload-module", "onload-sfcmod"}, f"{REGISTRY}/onload-module:8.1.2.26-{KERNEL}"),
        ("in-cluster-build-ocp-clusterlocal", {"onload-module"}, f"{REGISTRY}/onload-module:8.1.2.26-{KERNEL}"),
        ("pre-built", {"onload-module", "onload-sfcmod"}, f"{REGISTRY}/onload-module:8.1.2.26-{KERNEL}"),
        ("external-modules", set[str](), ""),
    ],
)
def test_each_overlay_is_complete(lab: Lab, overlay: str, modules: set[str], image: str) -> None:
    cluster = lab.cluster
    cluster.kubectl("apply", "--kustomize", OVERLAYS / overlay)
    try:
        wait_until(lambda: is_ready(lab), f"{overlay}: ready", 90, every=0.2)
        found = {each["metadata"]["name"]: each for each in items(lab, MODULES)}
        assert set(found) == modules
        if modules:
            images = loaded_images(lab)
            assert image in images
        listed = cluster.kubectl("get", "ds,pods,sa,roles,rolebindings", "-l", "app.kubernetes.io/part-of=onload")
        for kind in ("daemonset.apps/onload-onload-device-plugin-ds", "serviceaccount/", "role.rbac", "rolebinding."):
            assert kind in listed
        assert "pod/onload-onload-device-plugin-ds-" in listed
    finally:
        # The resource first: pods of KMM that unload modules need the service account.
        cluster.request("DELETE", RESOURCE)
        wait_until(
            lambda: cluster.get(RESOURCE) is None and not items(lab, MODULES), "resource and Modules: deleted", 60
        )
        cluster.kubectl("delete", "--ignore-not-found", "--wait", "--kustomize", OVERLAYS / overlay)
    node: Any = cluster.get(f"/api/v1/nodes/{NODE}")
    assert not [label for label in node["metadata"]["labels"] if "default.onload" in label]


def loaded_images(lab: Lab) -> set[str]:
    """The images of module pods, or of what the node has loaded."""
    if lab.kmm.generation == 2:
        found: Any = lab.kmm.node_config(NODE)
        return {each["config"]["containerImage"] for each in found["status"]["modules"]}
    pods = items(lab, "/api/v1/namespaces/default/pods?labelSelector=kmm.node.kubernetes.io/module.name")
    return {each["spec"]["containers"][0]["image"] for each in pods}


def is_ready(lab: Lab) -> bool:
    status = (lab.cluster.get(RESOURCE) or {}).get("status", {})
    holds = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
    return holds == {"Ready"} and status["onload"]["nodesUpgraded"] == 1


def items(lab: Lab, path: str) -> list[Object]:
    return (lab.cluster.get(path) or {"items": []})["items"]


@pytest.mark.parametrize(
    "directory",
    ["profiles", "sfnettest", "sfptpd/overlays/example-bond0", "sfptpd/overlays/link-local-peer-bond0",
     "sfptpd/overlays/system-clock", "default-clusterlocal"],
)  # fmt: skip
def test_other_samples_are_accepted(lab: Lab, directory: str) -> None:
    lab.cluster.kubectl("create", "namespace", "sfptpd", check=False)
    accepted = lab.cluster.kubectl("apply", "--server-side", "--dry-run=server", "--kustomize", SAMPLES / directory)
    assert accepted.count("serverside-applied (server dry run)") >= 1
