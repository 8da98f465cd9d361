"""The trees and the chart with certificates of the real cert-manager: injection, admission, renewal and removal."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import onloadresources
import pytest
from charts import CHARTS
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from customresources import resource
from manifests import DEPLOY, render, run_kubectl

from .certmanager import cert_manager, programs, renew
from .cluster import Cluster
from .machine import wait_until
from .node import Node
from .objects import Object, pod
from .releases import all_objects, runner, succeed
from .trees import applied

pytestmark = pytest.mark.cluster

OPERATOR_TREE = "operator/overlays/default-with-certmanager"
NO_CERT_MANAGER = 'no matches for kind "Certificate" in version "cert-manager.io/v1"'
CERTIFICATE = ("--set", "certificate.source=cert-manager")
SECRETS = {"secret/webhook-server-cert", "secret/webhook-ca-cert"}
CA_SECRET, SECRET = "webhook-ca-cert", "webhook-server-cert"
# Prints the certificate of a server whose chain and name are valid. Arguments: address, name, authority.
HANDSHAKE = """
import socket, ssl, sys
address, name, authority = sys.argv[1:]
context = ssl.create_default_context(cadata=authority)
with socket.create_connection((address, 443), timeout=30) as plain:
    with context.wrap_socket(plain, server_hostname=name) as secured:
        print(ssl.DER_cert_to_PEM_cert(secured.getpeercert(True)))
"""


@pytest.fixture(scope="module")
def built() -> None:
    """Skips before a cluster is started."""
    programs()


@pytest.fixture(scope="module")
def cluster_with_cert_manager(
    built: None, cluster: Cluster, image: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The cluster with cert-manager."""
    with cert_manager(cluster, tmp_path_factory.mktemp("cert-manager")):
        yield cluster


class Webhook(NamedTuple):
    """A webhook with a certificate of cert-manager. `admits` returns whether it processes a request."""

    tree: str
    namespace: str
    prefix: str
    admits: Callable[[Cluster], bool]


def completes_resources(cluster: Cluster) -> bool:
    manifest = resource("npu", "asked", nodeSelector={"example.com/nowhere": "true"})
    path = "/apis/deviceplugin.intel.com/v1/npudeviceplugins?dryRun=All"
    status, answer = cluster.request("POST", path, manifest)
    return status == 201 and "image" in answer["spec"]


def limits(cluster: Cluster, **resources: str) -> Object:
    status, answer = cluster.request(
        "POST", "/api/v1/namespaces/default/pods?dryRun=All", pod("asked", resources=resources)
    )
    return answer["spec"]["containers"][0]["resources"]["limits"] if status == 201 else {}


def adds_enclaves(cluster: Cluster) -> bool:
    return "sgx.intel.com/enclave" in limits(cluster, **{"sgx.intel.com/epc": "512Ki"})


def resolves_names(cluster: Cluster) -> bool:
    return f"fpga.intel.com/region-{'a' * 32}" in limits(cluster, **{"fpga.intel.com/card": "1"})


def validates_onloads(cluster: Cluster) -> bool:
    """The policy of the webhook is Fail, so a resource is admitted only if the webhook has answered."""
    path = "/apis/onload.amd.com/v1alpha1/namespaces/default/onloads?dryRun=All"
    return cluster.request("POST", path, onloadresources.resource())[0] == 201


REGION: Object = {
    "apiVersion": "fpga.intel.com/v2",
    "kind": "FpgaRegion",
    "metadata": {"name": "card", "namespace": "default"},
    "spec": {"interfaceId": "a" * 32},
}
SYSTEM = "inteldeviceplugins-system"
OPERATOR = Webhook(OPERATOR_TREE, SYSTEM, "inteldeviceplugins-", completes_resources)
SGX = Webhook(
    "sgx_admissionwebhook/overlays/default-with-certmanager", "intelsgxwebhook-system", "intelsgxwebhook-",
    adds_enclaves,
)  # fmt: skip
FPGA = Webhook(
    "fpga_admissionwebhook/overlays/default-with-certmanager", "intelfpgawebhook-system", "intelfpgawebhook-",
    resolves_names,
)  # fmt: skip


def secret(cluster: Cluster, namespace: str, name: str) -> dict[str, bytes]:
    found: Any = cluster.get(f"/api/v1/namespaces/{namespace}/secrets/{name}") or {}
    return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}


def public_key(certificate: bytes) -> bytes:
    key = x509.load_pem_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def bundles(cluster: Cluster, prefix: str) -> set[bytes]:
    """The authorities in the webhook configurations with this prefix."""
    found: set[bytes] = set()
    for kind in ("mutating", "validating"):
        path = f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations"
        listed: Any = cluster.get(path)
        for each in listed["items"]:
            if each["metadata"]["name"].startswith(prefix):
                found |= {base64.b64decode(hook["clientConfig"].get("caBundle", "")) for hook in each["webhooks"]}
    return found


def served_certificate(cluster: Cluster, node: Node, namespace: str, service: str, secret_name: str) -> bytes:
    """The certificate that a Service presents, verified with the authority in the Secret; empty if there is none."""
    found: Any = cluster.get(f"/api/v1/namespaces/{namespace}/services/{service}")
    authority = secret(cluster, namespace, secret_name).get("ca.crt", b"").decode()
    command = ["nsenter", f"--target={node.pid}", "--net", "--", sys.executable, "-c", HANDSHAKE]
    words = [found["spec"]["clusterIP"], f"{service}.{namespace}.svc", authority]
    result = subprocess.run([*command, *words], capture_output=True, check=False, timeout=60)
    return result.stdout.strip()


@contextmanager
def uninterrupted(cluster: Cluster, webhooks: Sequence[Webhook]) -> Iterator[Callable[[], None]]:
    """Sends requests all the time, and checks that the webhooks have processed each. Yields a function that returns
    after some more requests to each."""
    done = threading.Event()
    missed: list[str] = []
    sent = dict.fromkeys((webhook.tree for webhook in webhooks), 0)

    def ask() -> None:
        while not done.wait(0.1):
            for webhook in webhooks:
                if not webhook.admits(cluster):
                    missed.append(f"{webhook.tree}: request {sent[webhook.tree]}")
                sent[webhook.tree] += 1

    def has_more_requests() -> None:
        minimum = min(sent.values()) + 10
        wait_until(lambda: min(sent.values()) >= minimum, "more requests", 60)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield has_more_requests
    finally:
        done.set()
        thread.join(60)
    assert missed == []


def update_files(cluster: Cluster, namespace: str) -> None:
    """Makes the kubelet update the files of Secrets now, by a change of the pod."""
    cluster.kubectl("annotate", "pods", "--all", "--overwrite", f"--namespace={namespace}", "example.com/now=true")


def renewed(cluster: Cluster, webhook: Webhook, certificate: str, name: str) -> None:
    """Renews a certificate and waits for the content of its Secret."""
    before = secret(cluster, webhook.namespace, name)["tls.crt"]
    renew(cluster, webhook.namespace, f"{webhook.prefix}{certificate}")
    wait_until(lambda: secret(cluster, webhook.namespace, name)["tls.crt"] != before, f"{certificate}: renewed", 60)


def check_renewal(cluster: Cluster, node: Node, webhook: Webhook, has_more_requests: Callable[[], None]) -> None:
    """Renews authority and certificate. The key of the authority stays, that of the certificate does not."""
    place = (cluster, webhook.namespace)
    root, leaf = secret(*place, CA_SECRET)["tls.crt"], secret(*place, SECRET)["tls.crt"]
    renewed(cluster, webhook, "ca-cert", CA_SECRET)
    assert public_key(secret(*place, CA_SECRET)["tls.crt"]) == public_key(root)
    renewed(cluster, webhook, "serving-cert", SECRET)
    now = secret(*place, SECRET)
    assert public_key(now["tls.crt"]) != public_key(leaf)
    wait_until(lambda: bundles(cluster, webhook.prefix) == {now["ca.crt"]}, "the renewed authority: injected", 60)
    # Until the kubelet updates the files, the webhook has the old certificate, and the API server the new authority.
    has_more_requests()
    update_files(cluster, webhook.namespace)
    service = f"{webhook.prefix}webhook-service"
    wait_until(
        lambda: served_certificate(cluster, node, webhook.namespace, service, SECRET) == now["tls.crt"].strip(),
        f"{webhook.tree}: serves the renewed certificate", 120, every=1,
    )  # fmt: skip


def test_without_cert_manager_a_tree_and_the_chart_name_the_missing_kind(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/certificates.cert-manager.io"
    assert cluster.get(path) is None
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": render(DEPLOY / OPERATOR_TREE)})
    words = [cluster.assets.program("kubectl"), f"--kubeconfig={cluster.kubeconfig}", "apply", "--dry-run=server"]
    result = subprocess.run([*words, "--filename=-"], input=text, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert NO_CERT_MANAGER in result.stderr
    run = runner(cluster, namespace, tmp_path)
    before = all_objects(cluster, namespace)
    refused = run("install", "operator", CHARTS / "intel-device-plugins-operator", *CERTIFICATE)
    assert refused.returncode != 0
    assert NO_CERT_MANAGER in refused.stderr
    assert all_objects(cluster, namespace) == before


def test_certificates_of_the_trees_are_renewed_while_every_request_is_processed(
    cluster_with_cert_manager: Cluster, node: Node
) -> None:
    # The operator has the webhooks for pods too, so the others are tested without it.
    for webhooks in ((OPERATOR,), (SGX, FPGA)):
        with ExitStack() as undo:
            for webhook in webhooks:
                undo.enter_context(applied(cluster_with_cert_manager, render(DEPLOY / webhook.tree)))
            if FPGA in webhooks:
                definition = "crd/fpgaregions.fpga.intel.com"
                cluster_with_cert_manager.kubectl("wait", "--for=condition=Established", "--timeout=60s", definition)
                undo.enter_context(applied(cluster_with_cert_manager, [REGION]))
            for webhook in webhooks:
                wait_until(
                    lambda webhook=webhook: webhook.admits(cluster_with_cert_manager), f"{webhook.tree}: admits", 180
                )
                assert len(bundles(cluster_with_cert_manager, webhook.prefix)) == 1
            with uninterrupted(cluster_with_cert_manager, webhooks) as has_more_requests:
                for webhook in webhooks:
                    check_renewal(cluster_with_cert_manager, node, webhook, has_more_requests)
                has_more_requests()
        for webhook in webhooks:
            assert cluster_with_cert_manager.get(f"/api/v1/namespaces/{webhook.namespace}") is None
            assert bundles(cluster_with_cert_manager, webhook.prefix) == set()


def test_the_operator_chart_takes_its_certificate_from_cert_manager_and_leaves_its_secrets(
    cluster_with_cert_manager: Cluster, namespace: str, tmp_path: Path
) -> None:
    run = runner(cluster_with_cert_manager, namespace, tmp_path)
    before = all_objects(cluster_with_cert_manager, namespace)
    cluster_with_cert_manager.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    succeed(run("install", "operator", CHARTS / "intel-device-plugins-operator", *CERTIFICATE, "--wait"))
    wait_until(lambda: completes_resources(cluster_with_cert_manager), "custom resources: completed", 120)
    succeed(run("test", "operator"))
    succeed(run("uninstall", "operator", "--wait"))

    def remaining() -> set[str]:
        new = all_objects(cluster_with_cert_manager, namespace) - before
        return {each for each in new if not each.startswith("customresourcedefinition")}

    expected = {*SECRETS, "lease.coordination.k8s.io/d1c7b6d5.intel.com"}
    wait_until(lambda: remaining() == expected, f"only {expected} remain", 60, every=1)
    cluster_with_cert_manager.kubectl("delete", "--ignore-not-found", "--kustomize", DEPLOY / "operator/crd")


WEBHOOKS: dict[str, tuple[str, Callable[[Cluster], bool]]] = {
    "sgxWebhook": ("intelsgxwebhook-", adds_enclaves),
    "fpgaWebhook": ("intelfpgawebhook-", resolves_names),
    "onload": ("onload-operator-", validates_onloads),
}


def test_each_webhook_of_the_chart_accelplane_has_its_certificate_from_cert_manager(
    cluster_with_cert_manager: Cluster, namespace: str, tmp_path: Path
) -> None:
    run = runner(cluster_with_cert_manager, namespace, tmp_path)
    before = all_objects(cluster_with_cert_manager, namespace)
    names = ("components.{}=true", "{}.certificate.source=cert-manager")
    words = ["components.agent=false", "crds.keep=false", *(text.format(name) for name in WEBHOOKS for text in names)]
    notes = succeed(run("install", "webhooks", CHARTS / "accelplane", "--set", ",".join(words), "--wait"))
    secrets = {f"{prefix}webhook-{kind}-cert" for prefix, _ in WEBHOOKS.values() for kind in ("ca", "server")}
    assert {word.strip(".") for word in notes.split() if word.strip(".") in secrets} == secrets
    with applied(cluster_with_cert_manager, [REGION]):
        for name, (prefix, admits) in WEBHOOKS.items():
            wait_until(lambda admits=admits: admits(cluster_with_cert_manager), f"{name}: admits", 120)
            authority = secret(cluster_with_cert_manager, namespace, f"{prefix}webhook-server-cert")["ca.crt"]
            assert bundles(cluster_with_cert_manager, prefix) == {authority}
    succeed(run("test", "webhooks"))
    succeed(run("uninstall", "webhooks", "--wait"))
    expected = {*(f"secret/{name}" for name in secrets), "lease.coordination.k8s.io/daabde26.amd.com"}
    wait_until(
        lambda: all_objects(cluster_with_cert_manager, namespace) - before == expected,
        f"only {expected} remain",
        60,
        every=1,
    )


def test_the_certificate_of_xpu_manager_stays_valid_during_a_renewal(
    cluster_with_cert_manager: Cluster, namespace: str
) -> None:
    """The sidecar trusts the authority. XPU Manager presents the old certificate until it restarts."""
    file = DEPLOY / "xpumanager_sidecar/overlays/cert-manager/certificate.yaml"
    cluster_with_cert_manager.kubectl("apply", f"--namespace={namespace}", f"--filename={file}")
    name = "xpum-server-cert"
    wait_until(lambda: secret(cluster_with_cert_manager, namespace, name).get("tls.crt"), f"{name}: issued", 60)
    before = secret(cluster_with_cert_manager, namespace, name)
    renew(cluster_with_cert_manager, namespace, "serving-cert")
    wait_until(
        lambda: secret(cluster_with_cert_manager, namespace, name)["tls.crt"] != before["tls.crt"],
        f"{name}: renewed",
        60,
    )
    after = secret(cluster_with_cert_manager, namespace, name)
    assert public_key(after["tls.crt"]) != public_key(before["tls.crt"])
    authority = x509.load_pem_x509_certificate(after["ca.crt"])
    for leaf in (x509.load_pem_x509_certificate(each["tls.crt"]) for each in (before, after)):
        leaf.verify_directly_issued_by(authority)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_the_fleet_page_serves_a_certificate_of_cert_manager(cluster_with_cert_manager: Cluster, node: Node) -> None:
    name = "accelplane-fleet"
    with applied(cluster_with_cert_manager, render(DEPLOY / "fleet/overlays/secure-with-certmanager")):
        wait_until(
            lambda: served_certificate(cluster_with_cert_manager, node, name, name, "accelplane-fleet-tls"),
            "the page: verified",
            180,
            every=1,
        )
        leaf = secret(cluster_with_cert_manager, name, "accelplane-fleet-tls")["tls.crt"].strip()
        assert served_certificate(cluster_with_cert_manager, node, name, name, "accelplane-fleet-tls") == leaf


def test_the_plugin_for_labelled_nodes_brings_the_webhook_with_a_certificate(
    cluster_with_cert_manager: Cluster,
) -> None:
    with applied(cluster_with_cert_manager, render(DEPLOY / "sgx_plugin/overlays/epc-nfd")):
        wait_until(lambda: adds_enclaves(cluster_with_cert_manager), "pods: mutated", 180)


def test_own_names_of_a_tree_reach_cert_manager(cluster_with_cert_manager: Cluster, tmp_path: Path) -> None:
    """As in docs/deployments.md: two kustomizations, and the component in the upper one."""
    (tmp_path / "renamed").mkdir()
    for directory in (tmp_path, tmp_path / "renamed"):
        (directory / "deploy").symlink_to(DEPLOY)
    lower = {"resources": [f"deploy/{SGX.tree}"], "namePrefix": "team-", "namespace": "elsewhere"}
    upper = {"resources": ["renamed"], "components": ["deploy/components/certmanager-references"]}
    (tmp_path / "renamed/kustomization.yaml").write_text(json.dumps(lower))
    (tmp_path / "kustomization.yaml").write_text(json.dumps(upper))
    text = run_kubectl("kustomize", tmp_path)
    cluster_with_cert_manager.kubectl("apply", "--filename=-", text=text)
    try:
        wait_until(lambda: adds_enclaves(cluster_with_cert_manager), "pods: mutated", 180)
    finally:
        cluster_with_cert_manager.kubectl("delete", "--ignore-not-found", "--wait", "--filename=-", text=text)
