"""Pod admission with a real API server: decisions, trust, and certificates that change under load."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from manifests import DEPLOY, render
from msgspec.structs import replace
from waiting import until

from accelplane.admission import deviceconfig
from accelplane.admission.sgx import PATH, SgxOptions, mutator
from accelplane.http.servingtls import ServingTls
from accelplane.kube.admission import AdmissionServer, Hook, denying
from accelplane.kube.certificates import CertificatePolicy
from accelplane.kube.client import Client, load_config
from accelplane.kube.trust import ServiceReference, Target, TargetKind, Trust, TrustSettings, WebhookEntry
from accelplane.kube.truststore import ClusterTrustStore

from .build import kubernetes_minor
from .cluster import Cluster

pytestmark = pytest.mark.cluster

NAMESPACE = "admission"
SERVICE = "hooks"
NAME = f"{SERVICE}.{NAMESPACE}.svc"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@pytest.fixture(scope="module")
def api(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane without nodes, with a namespace for pods."""
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        # No kube-proxy forwards from a Service to this process.
        hosts = running.control.path("/etc/hosts")
        hosts.write_text(f"127.0.0.1 localhost\n{running.addresses.host} {NAME}\n")
        yield running


def pod(epc: str = "1Mi", *, provider: str = "", **spec: Any) -> dict[str, Any]:
    annotations = {"sgx.intel.com/quote-provider": provider} if provider else {}
    resources = {"limits": {"sgx.intel.com/epc": epc}}
    return {
        "metadata": {"generateName": "p-", "annotations": annotations},
        "spec": {"containers": [{"name": "a", "image": "x", "resources": resources}], **spec},
    }


def mutating(client_config: dict[str, Any], name: str = "sgx-test", namespace: str = NAMESPACE) -> dict[str, Any]:
    hook = {
        "name": "sgx.mutator.webhooks.intel.com",
        "clientConfig": client_config,
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
        # The original has Ignore. Fail makes every failure visible.
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "reinvocationPolicy": "IfNeeded",
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [hook],
    }


class Store(ClusterTrustStore):
    """The store in the cluster. Records issued certificates, and uses the URL of this process, not a Service."""

    def __init__(self, client: Client, *names: str) -> None:
        super().__init__(client, NAMESPACE, "own", {"MutatingWebhookConfiguration": names})
        self.authorities: list[bytes] = []
        self.certificates: list[bytes] = []

    async def write(self, data: dict[str, bytes], version: str | None) -> bool:
        self.authorities.append(data["ca.crt"])
        self.certificates.append(data["tls.crt"])
        return await super().write(data, version)

    async def targets(self) -> Sequence[tuple[TargetKind, Target]]:
        return [
            (kind, replace(target, webhooks=[self._served(entry) for entry in target.webhooks or ()]))
            for kind, target in await super().targets()
        ]

    @staticmethod
    def _served(entry: WebhookEntry) -> WebhookEntry:
        return replace(entry, client_config=replace(entry.client_config, service=ServiceReference(SERVICE, NAMESPACE)))


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Client]:
    client = Client(load_config(str(cluster.kubeconfig)), field_manager="test")
    try:
        yield client
    finally:
        await client.close()


async def ask(cluster: Cluster, body: dict[str, Any]) -> tuple[int, Any]:
    return await asyncio.to_thread(cluster.request, "POST", PODS, body)


@asynccontextmanager
async def serving_webhooks(
    cluster: Cluster, tls: ServingTls, *hooks: Hook, authority: bytes = b""
) -> AsyncIterator[AdmissionServer]:
    """A server in this process that the API server calls about pods. The API server trusts `authority`."""
    server = AdmissionServer(hooks or [mutator(SgxOptions())])
    port = await server.start(None, 0, tls.connection_context)
    where = {"url": f"https://{NAME}:{port}{PATH}"}
    cluster.apply(mutating(where | ({"caBundle": base64.b64encode(authority).decode()} if authority else {})))
    try:
        yield server
    finally:
        cluster.request("DELETE", f"{HOOKS}/sgx-test")
        await server.stop(1)


async def wait_for_requests(cluster: Cluster, server: AdmissionServer) -> None:
    """Waits until the API server calls the webhook. It gets configurations by a watch."""

    async def is_called() -> bool:
        await ask(cluster, pod())
        return any(200 in tally.codes for tally in server.stats.values())

    await until(is_called, 30)


def served_by(cluster: Cluster) -> ServingTls:
    pair = cluster.server_certificate("hooks", NAME)
    tls = ServingTls()
    tls.use(pair.certificate, pair.key)
    return tls


async def test_a_pod_is_mutated_by_both_webhooks_as_in_the_tables(api: Cluster) -> None:
    async with serving_webhooks(api, served_by(api), authority=api.authority) as server:
        await wait_for_requests(api, server)
        status, instance = await ask(api, pod("512Ki", provider="aesmd", hostNetwork=False))
    assert status == 201, instance
    one = instance["spec"]["containers"][0]
    assert one["resources"]["limits"] == one["resources"]["requests"]
    assert one["resources"]["limits"] == {"sgx.intel.com/epc": "512Ki", "sgx.intel.com/enclave": "1"}
    assert {"name": "aesmd-socket", "mountPath": "/var/run/aesmd"} in one["volumeMounts"]
    assert one["env"] == [{"name": "SGX_AESM_ADDR", "value": "1"}]
    assert instance["metadata"]["annotations"]["sgx.intel.com/epc"] == "512Ki"


async def test_the_message_of_a_denial_is_shown_to_the_user(api: Cluster) -> None:
    async with serving_webhooks(
        api, served_by(api), denying(PATH, "SGX is off, see --devices"), authority=api.authority
    ) as server:
        await wait_for_requests(api, server)
        status, answer = await ask(api, pod())
    assert status == 403, answer
    words = 'admission webhook "sgx.mutator.webhooks.intel.com" denied the request: SGX is off, see --devices'
    assert words in answer["message"]


async def test_a_warning_reaches_kubectl(api: Cluster) -> None:
    async with serving_webhooks(api, served_by(api), authority=api.authority) as server:
        await wait_for_requests(api, server)
        manifest = {"apiVersion": "v1", "kind": "Pod", **pod(provider="nobody")}
        arguments = ("create", "--dry-run=server", f"--namespace={NAMESPACE}", "--filename=-")
        result = await asyncio.to_thread(
            subprocess.run,
            [api.assets.program("kubectl"), *arguments],
            input=json.dumps(manifest),
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"KUBECONFIG": str(api.kubeconfig)},
        )
    assert "Warning: sgx.intel.com/quote-provider: 'nobody' names no container" in result.stderr


async def test_authorities_and_certificates_change_under_load_and_every_pod_is_admitted(api: Cluster) -> None:
    # Certificates are renewed in the last third of their lifetime. These started ten minutes ago and expire soon.
    policy = CertificatePolicy(
        authority=timedelta(seconds=309), serving=timedelta(seconds=304.5), overlap=timedelta(seconds=3)
    )
    trust_settings = TrustSettings(service=SERVICE, namespace=NAMESPACE, policy=policy, min_interval=0.2)
    tls, pods = ServingTls(), 0
    async with connected(api) as client, serving_webhooks(api, tls) as server:
        store = Store(client, "sgx-test", "not-there")
        running = asyncio.create_task(Trust(store, tls, trust_settings).run())
        try:
            await wait_for_requests(api, server)
            before = len(set(store.authorities)), len(set(store.certificates))

            async def load() -> None:
                nonlocal pods
                while len(set(store.authorities)) < before[0] + 3 or len(set(store.certificates)) < before[1] + 3:
                    status, instance = await ask(api, pod())
                    assert status == 201, instance
                    assert "sgx.intel.com/enclave" in instance["spec"]["containers"][0]["resources"]["limits"]
                    pods += 1

            async with asyncio.timeout(90):
                await asyncio.gather(*(load() for _ in range(4)))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/secrets/own")
    assert pods > 100


async def test_two_programs_share_one_certificate_whoever_is_first(api: Cluster) -> None:
    trust_settings = TrustSettings(service=SERVICE, namespace=NAMESPACE)
    api.apply(mutating({"service": {"name": SERVICE, "namespace": NAMESPACE}}, "injected", "nowhere"))
    try:
        async with connected(api) as client:
            stores = [Store(client, "injected"), Store(client, "injected")]
            both = [Trust(store, ServingTls(), trust_settings) for store in stores]
            await asyncio.gather(*(one.reconcile() for one in both))
            secret = await stores[0].read()
        assert secret is not None
        found = api.get(f"{HOOKS}/injected")
        assert found is not None
        assert base64.b64decode(found["webhooks"][0]["clientConfig"]["caBundle"]) == secret.data["ca.crt"]
    finally:
        api.request("DELETE", f"{HOOKS}/injected")
        api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/secrets/own")


def configured(kind: str, driver: str = "fpga.intel.com", **fields: Any) -> tuple[str, dict[str, Any]]:
    """The path for objects of the kind, and an object with a configuration."""
    parameters = {"apiVersion": f"{driver}/v1alpha1", "kind": "FpgaConfig", **fields}
    config = [{"opaque": {"driver": driver, "parameters": parameters}}]
    claim = {"devices": {"requests": [{"name": "a", "exactly": {"deviceClassName": "a"}}], "config": config}}
    specs = {"resourceclaims": claim, "resourceclaimtemplates": {"spec": claim}, "deviceclasses": {"config": config}}
    place = "" if kind == "deviceclasses" else f"/namespaces/{NAMESPACE}"
    path = f"/apis/resource.k8s.io/v1{place}/{kind}"
    return path, {"metadata": {"name": "configured"}, "spec": specs[kind]}


async def test_configurations_of_claims_and_classes_are_checked_and_other_objects_do_not_wait(api: Cluster) -> None:
    if kubernetes_minor() < 34:
        pytest.skip("resource.k8s.io/v1 needs Kubernetes 1.34")
    name = "ValidatingWebhookConfiguration"
    (document,) = (each for each in render(DEPLOY / "operator/overlays/dra-webhook") if each["kind"] == name)
    document["webhooks"] = document["webhooks"][-1:]

    async def send(path: str, body: dict[str, Any], method: str = "POST", **more: Any) -> str:
        status, answer = await asyncio.to_thread(api.request, method, path, body, **more)
        return "" if status < 300 else f"{status}: {answer['message']}"

    async def denied(kind: str, **fields: Any) -> str:
        path, body = configured(kind, **fields)
        return await send(f"{path}?dryRun=All", body | {"metadata": {"generateName": "a-"}})

    old = configured("deviceclasses", relase="reset")
    assert await send(*old) == ""
    server = AdmissionServer([deviceconfig.validator()])
    port = await server.start(None, 0, served_by(api).connection_context)
    client = {"url": f"https://{NAME}:{port}{deviceconfig.PATH}", "caBundle": base64.b64encode(api.authority).decode()}
    document["webhooks"][0]["clientConfig"] = client
    api.apply(document)
    try:

        async def is_called() -> bool:
            return bool(await denied("resourceclaims", relase="reset"))

        await until(is_called, 30)
        for kind in ("resourceclaims", "resourceclaimtemplates", "deviceclasses"):
            assert "unknown field 'relase' of FpgaConfig; did you mean release?" in await denied(kind, relase="keep")
            assert await denied(kind, afu="abc") == ""
        assert "release can only be set in a device class" in await denied("resourceclaims", release="reset")
        assert await denied("deviceclasses", release="reset") == ""
        before = server.stats[deviceconfig.PATH].codes.total()
        assert await denied("resourceclaims", driver="net.example.com", relase="reset") == ""
        assert server.stats[deviceconfig.PATH].codes.total() == before
        label = {"metadata": {"labels": {"a": "b"}}}
        patch = "application/merge-patch+json"
        assert await send(f"{old[0]}/configured", label, "PATCH", content=patch) == ""
        changed = {"spec": configured("deviceclasses", relase="keep")[1]["spec"]}
        assert "did you mean release?" in await send(f"{old[0]}/configured", changed, "PATCH", content=patch)
        await server.stop(1)
        assert await denied("resourceclaims", relase="reset") == ""
    finally:
        await server.stop(1)
        api.kubectl("delete", name, document["metadata"]["name"])
        api.kubectl("delete", "deviceclass", "configured")
