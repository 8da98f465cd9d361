"""The trees of the SGX webhook on a real cluster: restricted pods, with the rights and the memory of the manifests."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import render

from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .objects import pod
from .trees import applied, encoded, tls_secret

pytestmark = pytest.mark.cluster

OVERLAYS = REPOSITORY / "deploy/sgx_admissionwebhook/overlays"
NAMESPACE = "intelsgxwebhook-system"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/intelsgxwebhook-own-certificate"
EPC_REQUEST = {"sgx.intel.com/epc": "512Ki"}


def webhook(cluster: Cluster) -> Any:
    """The status of the container of the only pod."""
    found: Any = cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods")
    (one,) = found["items"]
    (status,) = one["status"]["containerStatuses"]
    return status


def is_mutated(cluster: Cluster, namespace: str) -> bool:
    """Whether the webhook adds the device to a pod that requests EPC."""
    requesting_pod = pod("asking", namespace=namespace, resources=EPC_REQUEST)
    status, answer = cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", requesting_pod)
    assert status == 201, answer
    return "sgx.intel.com/enclave" in answer["spec"]["containers"][0]["resources"]["limits"]


def wait_for_it(cluster: Cluster, namespace: str) -> None:
    hint = f"see kubectl --kubeconfig={cluster.kubeconfig} get events -n {NAMESPACE}"
    wait_until(lambda: is_mutated(cluster, namespace), "pods: mutated", 60, hint=hint)


def test_the_tree_with_its_own_certificate_needs_no_other_component(
    image: None, cluster: Cluster, namespace: str
) -> None:
    tree = OVERLAYS / "default-with-own-certificates"
    with applied(cluster, render(tree)):
        wait_for_it(cluster, namespace)
        kept: Any = cluster.get(SECRET)
        # An upgrade applies the tree again. The Secret keeps its content.
        cluster.kubectl("apply", "--kustomize", tree)
        again: Any = cluster.get(SECRET)
        assert again["data"] == kept["data"]
        assert is_mutated(cluster, namespace)
        assert webhook(cluster)["restartCount"] == 0


def test_the_webhook_serves_the_certificate_of_cert_manager(image: None, cluster: Cluster, namespace: str) -> None:
    objects = [
        each for each in render(OVERLAYS / "default-with-certmanager") if "cert-manager" not in each["apiVersion"]
    ]
    host = f"intelsgxwebhook-webhook-service.{NAMESPACE}.svc"
    secret = tls_secret(NAMESPACE, "webhook-server-cert", cluster.server_certificate(host, host))
    (configuration,) = (each for each in objects if each["kind"] == "MutatingWebhookConfiguration")
    (hook,) = configuration["webhooks"]
    hook["clientConfig"]["caBundle"] = encoded(cluster.authority)
    namespaced, *others = objects
    assert namespaced["kind"] == "Namespace"
    # The kubelet retries the mount of a missing Secret only after a delay, so the Secret is created first.
    with applied(cluster, [namespaced, secret, *others]):
        wait_for_it(cluster, namespace)
        assert webhook(cluster)["restartCount"] == 0
