"""Maintaining the webhooks' certificate with the rights of the operator's tree, and with those of older manifests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from manifests import render
from waiting import until

from accelplane.http.servingtls import ServingTls
from accelplane.kube.client import Client, load_config
from accelplane.kube.trust import Trust, TrustSettings
from accelplane.kube.truststore import ClusterTrustStore

from .cluster import Cluster
from .machine import REPOSITORY
from .objects import Object
from .trees import applied

pytestmark = pytest.mark.cluster

NAMESPACE, PREFIX = "inteldeviceplugins-system", "inteldeviceplugins-"
NAME = f"{PREFIX}own-certificate"
USER = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "operator"}
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
CONFIGURATION = f"{PREFIX}mutating-webhook-configuration"


def rights() -> list[Object]:
    """The tree's Secret and roles for the certificate, bound to a user instead of the service account."""
    found = [one for one in render(REPOSITORY / "deploy/operator/default") if one["metadata"]["name"] == NAME]
    return [{**one, "subjects": [USER]} if "subjects" in one else one for one in found]


def older(objects: list[Object]) -> list[Object]:
    """The same with the verbs of older manifests."""
    for one in objects:
        named = [rule for rule in one.get("rules", ()) if "resourceNames" in rule]
        if "rules" in one:
            one["rules"] = [{**rule, "verbs": ["get", "patch"]} for rule in named]
    return objects


def configuration() -> Object:
    hook = {
        "name": "a.example.com",
        "clientConfig": {"service": {"name": f"{PREFIX}webhook-service", "namespace": NAMESPACE}},
        "rules": [{"operations": ["CREATE"], "apiGroups": ["none"], "apiVersions": ["v1"], "resources": ["nones"]}],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
    return {**kind, "metadata": {"name": CONFIGURATION}, "webhooks": [hook]}


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        yield running


@contextmanager
def apply_rights(cluster: Cluster, objects: list[Object]) -> Iterator[None]:
    with applied(cluster, [*objects, configuration()]):
        yield


@asynccontextmanager
async def running(cluster: Cluster, directory: Path, problems: list[str]) -> AsyncIterator[ClusterTrustStore]:
    """A `Trust` with the rights of the operator's account. It polls every second, or resyncs after an hour."""
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(cluster.user(USER["name"]))
    config = load_config(str(kubeconfig))
    client = Client(config, field_manager="test")
    store = ClusterTrustStore(client, NAMESPACE, NAME, {"MutatingWebhookConfiguration": [CONFIGURATION]})
    settings = TrustSettings(
        service=f"{PREFIX}webhook-service", namespace=NAMESPACE, poll_interval=1, resync=3600, retry=1
    )
    task = asyncio.create_task(Trust(store, ServingTls(), settings, on_problem=problems.append).run())
    try:
        yield store
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


def data(cluster: Cluster) -> dict[str, str]:
    return (cluster.get(SECRET) or {}).get("data") or {}


def bundle(cluster: Cluster) -> str:
    found: Any = cluster.get(f"{HOOKS}/{CONFIGURATION}")
    return found["webhooks"][0]["clientConfig"].get("caBundle", "")


async def test_trees_rights_suffice_to_watch_and_to_restore(cluster: Cluster, tmp_path: Path) -> None:
    problems: list[str] = []
    with apply_rights(cluster, rights()):
        async with running(cluster, tmp_path, problems) as store:
            await until(lambda: store.watching and bool(bundle(cluster)), 60)
            before = data(cluster)
            cluster.request("DELETE", SECRET)
            await until(lambda: data(cluster) == before, 30)
            cluster.request("PUT", f"{HOOKS}/{CONFIGURATION}", configuration())
            await until(lambda: bundle(cluster) == before["ca.crt"], 30)
    assert problems == []


async def test_rights_of_older_manifests_make_it_poll_and_report_a_deleted_secret(
    cluster: Cluster, tmp_path: Path
) -> None:
    problems: list[str] = []
    with apply_rights(cluster, older(rights())):
        async with running(cluster, tmp_path, problems) as store:
            await until(lambda: bool(bundle(cluster)), 60)
            assert not store.watching
            before = data(cluster)
            cluster.request("DELETE", SECRET)
            await until(lambda: bool(problems), 30)
            assert f"run kubectl create secret generic {NAME} --namespace {NAMESPACE}" in problems[0]
            cluster.request("PUT", f"{HOOKS}/{CONFIGURATION}", configuration())
            await until(lambda: bundle(cluster) == before["ca.crt"], 30)
            cluster.kubectl("create", "secret", "generic", NAME, f"--namespace={NAMESPACE}")
            await until(lambda: data(cluster) == before, 30)
