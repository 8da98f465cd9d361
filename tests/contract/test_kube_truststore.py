"""The trust store on a client, against the double of the API server."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from kubeapi import KubeApi
from waiting import until

from accelplane.http.servingtls import ServingTls
from accelplane.kube.authority import plan_renewal_in_process
from accelplane.kube.client import Client
from accelplane.kube.trust import SecretMissing, Trust, TrustError, TrustSettings
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


def trust(store: ClusterTrustStore, settings: TrustSettings = SETTINGS) -> Trust:
    """Without a child process for each renewal."""
    return Trust(store, ServingTls(), settings, planner=plan_renewal_in_process)


async def test_missing_secret_is_created_once(api: KubeApi, store: ClusterTrustStore) -> None:
    for _ in range(2):
        tls = ServingTls()
        await Trust(store, tls, SETTINGS).reconcile()
        assert tls.ready
    secret = api.get("secrets", "own", "n")
    assert secret is not None
    assert set(secret["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert api.count("POST .*secrets") == 1
    assert api.count("PATCH") == 0


async def test_targets_of_all_kinds_are_read(api: KubeApi, store: ClusterTrustStore) -> None:
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
@pytest.mark.parametrize("description", ["GET .*secrets", "POST .*secrets", "GET .*mutatingwebhookconfigurations"])
async def test_failed_request_is_a_trust_error_and_the_next_pass_succeeds(
    api: KubeApi, store: ClusterTrustStore, description: str, status: int
) -> None:
    api.fault(description, status)
    each = trust(store)
    with pytest.raises(TrustError, match=str(status)):
        await each.reconcile()
    await each.reconcile()


@pytest.mark.parametrize("status", [404, 409])
async def test_conflicting_write_is_repeated_from_a_new_read(
    api: KubeApi, store: ClusterTrustStore, status: int
) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {}})
    api.fault("PATCH .*secrets", status)
    await trust(store).reconcile()
    assert api.count("PATCH .*secrets") == 2


async def test_secret_that_changes_during_each_write_is_reported(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {}})
    api.fault("PATCH .*secrets", 409, times=100)
    with pytest.raises(TrustError, match="changed during each"):
        await trust(store).reconcile()


async def test_invalid_base64_is_reported_with_the_secret(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {"tls.crt": "%"}})
    with pytest.raises(TrustError, match=r"secret n/own: .*base64"):
        await store.read()


async def test_other_data_of_the_secret_is_preserved(api: KubeApi, store: ClusterTrustStore) -> None:
    encoded = base64.b64encode(b"mine").decode()
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {"note": encoded}})
    await trust(store).reconcile()
    secret = api.get("secrets", "own", "n")
    assert secret is not None
    assert secret["data"]["note"] == encoded


async def test_write_fails_if_the_secret_changed_since_it_was_read(api: KubeApi, store: ClusterTrustStore) -> None:
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {}})
    found = await store.read()
    assert found is not None
    api.put("secrets", {"metadata": {"name": "own", "namespace": "n"}, "data": {"note": "bWluZQ=="}})
    assert not await store.write({"note": b"stale"}, found.version)
    assert api.objects["secrets", "n", "own"]["data"] == {"note": "bWluZQ=="}
    found = await store.read()
    assert found is not None
    assert await store.write({"note": b"new"}, found.version)


async def test_secret_that_may_not_be_created_is_reported_with_the_remedy(
    api: KubeApi, store: ClusterTrustStore
) -> None:
    api.fault("POST .*secrets", 403)
    with pytest.raises(
        SecretMissing, match=r"secret n/own: not found.*kubectl create secret generic own --namespace n"
    ):
        await store.write({}, None)


@asynccontextmanager
async def running(store: ClusterTrustStore) -> AsyncIterator[None]:
    """A `Trust` that would poll after an hour only."""
    settings = msgspec.structs.replace(SETTINGS, poll_interval=3600, resync=3600, min_interval=0.01)
    task = asyncio.create_task(trust(store, settings).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def configuration(**config: object) -> dict[str, object]:
    return {"metadata": {"name": "m"}, "webhooks": [{"name": "a", "clientConfig": {**OURS, **config}}]}


def bundle(api: KubeApi) -> str:
    return api.objects["mutatingwebhookconfigurations", "", "m"]["webhooks"][0]["clientConfig"].get("caBundle", "")


async def test_deleted_secret_and_reapplied_configuration_are_repaired_immediately(
    api: KubeApi, store: ClusterTrustStore
) -> None:
    async with running(store):
        await until(lambda: store.watching and bool(api.get("secrets", "own", "n")), 30)
        before = api.objects["secrets", "n", "own"]["data"]
        api.remove("secrets", "own", "n")
        await until(lambda: bool(api.get("secrets", "own", "n")), 30)
        assert api.objects["secrets", "n", "own"]["data"] == before
        api.put("mutatingwebhookconfigurations", configuration())
        await until(lambda: bundle(api) == before["ca.crt"], 30)
        api.put("mutatingwebhookconfigurations", configuration(caBundle="b2xk"))
        await until(lambda: bundle(api) == before["ca.crt"], 30)


async def test_watches_request_only_metadata_of_the_named_objects(api: KubeApi, store: ClusterTrustStore) -> None:
    async with running(store):
        await until(lambda: store.watching and api.open_watches == 5, 30)
    collections = [
        request for request in api.requests if request.method == "GET" and "fieldSelector" in request.parameters
    ]
    assert {request.parameters["fieldSelector"] for request in collections} == {
        f"metadata.name={name}" for name in ("own", "m", "absent", "v", "c")
    }
    assert all("PartialObjectMetadata" in request.accept for request in collections)


async def test_an_account_without_the_right_to_list_polls(api: KubeApi, store: ClusterTrustStore) -> None:
    api.fault("(GET|WATCH) .*(secrets|configurations|definitions)$", 403, times=1000)
    settings = msgspec.structs.replace(SETTINGS, poll_interval=0.05, min_interval=0.01)
    task = asyncio.create_task(trust(store, settings).run())
    try:
        await until(lambda: bool(api.get("secrets", "own", "n")), 30)
        api.put("mutatingwebhookconfigurations", configuration())
        await until(lambda: bool(bundle(api)), 30)
        assert not store.watching
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
