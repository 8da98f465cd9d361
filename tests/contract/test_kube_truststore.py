"""Keeping a webhook's certificate with a client, against the double of the API server."""

import base64
from collections.abc import AsyncIterator

import pytest
from kubeapi import KubeApi

from accelplane.kube.client import Client
from accelplane.kube.tls import ServingTls
from accelplane.kube.trust import Trust, TrustError, TrustSettings
from accelplane.kube.truststore import ClusterTrustStore

SETTINGS = TrustSettings(service="hooks", namespace="n")
OURS = {"service": {"name": "hooks", "namespace": "n"}}


@pytest.fixture
async def store(api: KubeApi) -> AsyncIterator[ClusterTrustStore]:
    client = Client(api.config, field_manager="test")
    names = {
        "MutatingWebhookConfiguration": ["m", "absent"],
        "ValidatingWebhookConfiguration": ["v"],
        "CustomResourceDefinition": ["c"],
    }
    yield ClusterTrustStore(client, "n", "own", names)  # type: ignore[arg-type]
    await client.close()


async def test_a_secret_that_is_not_there_is_made_and_then_left_alone(api: KubeApi, store: ClusterTrustStore) -> None:
    for _ in range(2):
        tls = ServingTls()
        await Trust(store, tls, SETTINGS).settle()
        assert tls.ready
    secret = api.get("secrets", "own", "n")
    assert secret is not None
    assert set(secret["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert api.count("POST .*secrets") == 1
    assert api.count("PATCH") == 0


async def test_all_kinds_that_may_lead_to_webhooks_are_looked_at(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put(
        "mutatingwebhookconfigurations", {"metadata": {"name": "m"}, "webhooks": [{"name": "a", "clientConfig": OURS}]}
    )
    api.put("validatingwebhookconfigurations", {"metadata": {"name": "v"}})
    conversion = {"strategy": "Webhook", "webhook": {"clientConfig": OURS}}
    api.put("customresourcedefinitions", {"metadata": {"name": "c"}, "spec": {"conversion": conversion}})
    found = {target.metadata.name: target for _kind, target in await store.targets()}
    assert set(found) == {"m", "v", "c"}
    assert found["m"].webhooks is not None
    assert found["m"].webhooks[0].client_config.service is not None
    assert found["c"].spec is not None
    assert found["c"].spec.conversion is not None


@pytest.mark.parametrize("status", [403, 500])
@pytest.mark.parametrize("what", ["GET .*secrets", "POST .*secrets", "GET .*mutatingwebhookconfigurations"])
async def test_what_goes_wrong_is_tried_again_later(
    api: KubeApi, store: ClusterTrustStore, what: str, status: int
) -> None:
    api.fault(what, status)
    trust = Trust(store, ServingTls(), SETTINGS)
    with pytest.raises(TrustError, match=str(status)):
        await trust.settle()
    await trust.settle()


@pytest.mark.parametrize("status", [404, 409])
async def test_a_write_that_lost_a_race_is_decided_anew(api: KubeApi, store: ClusterTrustStore, status: int) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {}})
    api.fault("PATCH .*secrets", status)
    await Trust(store, ServingTls(), SETTINGS).settle()
    assert api.count("PATCH .*secrets") == 2


async def test_a_secret_that_never_stays_is_said(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {}})
    api.fault("PATCH .*secrets", 409, times=100)
    with pytest.raises(TrustError, match="changes each time"):
        await Trust(store, ServingTls(), SETTINGS).settle()


async def test_content_that_is_not_base64_is_named(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {"tls.crt": "%"}})
    with pytest.raises(TrustError, match=r"secret n/own: .*base64"):
        await store.read()


async def test_what_else_is_in_the_secret_stays(api: KubeApi, store: ClusterTrustStore) -> None:
    mine = base64.b64encode(b"mine").decode()
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {"note": mine}})
    await Trust(store, ServingTls(), SETTINGS).settle()
    secret = api.get("secrets", "own", "n")
    assert secret is not None
    assert secret["data"]["note"] == mine
