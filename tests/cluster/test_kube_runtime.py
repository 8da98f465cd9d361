"""The controller runtime with a real API server, etcd and garbage collector: restarts, suspension, compaction."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar

import pytest
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Pod, PodEviction, ServiceAccountToken
from lightkube.resources.core_v1 import Namespace as NamespaceObject
from msgspec import Struct, structs
from waiting import until

from accelplane.apiserver import Conflict, Gone, NotFound, StatusError
from accelplane.authorized import Authorized
from accelplane.http.messages import HttpError, Response
from accelplane.http.messages import Request as HttpRequest
from accelplane.kube.client import Client, Selection, load_config
from accelplane.kube.events import Recorder
from accelplane.kube.finalizers import add_finalizer, remove_finalizer
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.leader import Election, LeaderElector
from accelplane.kube.objects import ApiInfo, Metadata, NamespacedResource, Request
from accelplane.kube.objects import api as api_info
from accelplane.kube.tasks import cancel

from .cluster import Cluster
from .kube_programs import (
    CRD,
    GREETINGS,
    NAMESPACE,
    TEXTS,
    connected,
    create_greeting,
    program,
    text,
    wait_text,
)
from .machine import wait_until

pytestmark = pytest.mark.cluster

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
LABELED = Selection(namespace=NAMESPACE, labels="test=runtime")


@pytest.fixture(scope="module")
def api(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane without nodes, with the page's custom resource."""
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        status, answer = running.request("POST", path, CRD)
        assert status == 201, answer
        wait_until(lambda: running.get(GREETINGS), "the custom resource: served")
        yield running


def holder(cluster: Cluster) -> str:
    found = cluster.get(f"{LEASES}/greeter")
    return found["spec"].get("holderIdentity", "") if found else ""


def compact(cluster: Cluster) -> None:
    """Compacts etcd to the current revision."""
    script = (
        "import json, sys, urllib.request as u\n"
        "def ask(what, body):\n"
        "    return json.load(u.urlopen('http://127.0.0.1:2379/v3/kv/' + what, json.dumps(body).encode()))\n"
        "revision = ask('range', {'key': 'YQ=='})['header']['revision']\n"
        "ask('compaction', {'revision': revision, 'physical': True})\n"
    )
    cluster.control.run(sys.executable, "-c", script)


async def test_the_documented_example_behaves_as_described(api: Cluster) -> None:
    with program(api, "one") as process:
        await asyncio.to_thread(create_greeting, api, "g", "you")
        await asyncio.to_thread(wait_text, api, "g", "Hello, you!")
        await asyncio.to_thread(create_greeting, api, "g", "all")
        await asyncio.to_thread(wait_text, api, "g", "Hello, all!")
        api.request("DELETE", f"{TEXTS}/g")
        await asyncio.to_thread(wait_text, api, "g", "Hello, all!")
        owner = (api.get(f"{TEXTS}/g") or {})["metadata"]["ownerReferences"][0]
        assert owner["uid"] == (api.get(f"{GREETINGS}/g") or {})["metadata"]["uid"]
        events = "/apis/events.k8s.io/v1/namespaces/greetings/events"
        await until(lambda: any(one["reason"] == "Greeted" for one in (api.get(events) or {"items": []})["items"]))
        foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "foreign"}, "data": {"text": "Mine!"}}
        assert api.request("POST", TEXTS, foreign)[0] == 201
        await asyncio.to_thread(create_greeting, api, "foreign", "you")

        def conflicts() -> bool:
            return any(one["reason"] == "NameConflict" for one in (api.get(events) or {"items": []})["items"])

        await until(conflicts, 30)
        assert (api.get(f"{TEXTS}/foreign") or {})["data"] == {"text": "Mine!"}
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert holder(api) == ""


async def test_finalizers_delay_deletion_and_keep_those_of_others(api: Cluster) -> None:
    finalizer, other = "example.com/ours", "example.com/other"
    async with connected(api) as client:
        stale = await client.create(text("finalized"))
        await add_finalizer(client, stale, other)
        added = await add_finalizer(client, stale, finalizer)
        assert added.metadata
        assert added.metadata.finalizers == [other, finalizer]
        assert await client.delete(ConfigMap, "finalized", NAMESPACE)
        deleting = await client.get(ConfigMap, "finalized", NAMESPACE)
        assert deleting.metadata
        assert deleting.metadata.deletionTimestamp
        with pytest.raises(ValueError, match="ConfigMap finalized: is being deleted"):
            await add_finalizer(client, deleting, "example.com/late")
        await remove_finalizer(client, added, other)
        left = await remove_finalizer(client, added, finalizer)
        assert left is None or left.metadata
        with pytest.raises(NotFound):
            await client.get(ConfigMap, "finalized", NAMESPACE)
        assert await remove_finalizer(client, added, finalizer) is None


async def test_caches_of_two_types_share_one_watch_of_metadata_only_if_both_read_no_more(api: Cluster) -> None:
    class Outline(NamespacedResource, Struct):
        _api_info: ClassVar[ApiInfo] = api_info("", "v1", "ConfigMap", "configmaps")
        metadata: Metadata

    async with connected(api) as client:
        await client.apply(text("shared", a="1"))
        for kinds, full in ((Outline, ConfigMap), True), ((Outline, Outline), False):
            informer = Informer(client, LABELED)
            first, second = (informer.cache(kind) for kind in kinds)
            running = asyncio.create_task(informer.run())
            await until(lambda caches=(first, second): all(len(cache) == 1 for cache in caches), 20)
            await client.apply(text("shared", a="2"))
            version = (await client.get(ConfigMap, "shared", NAMESPACE)).metadata
            assert version
            key = Request("shared", NAMESPACE)
            await until(
                lambda caches=(first, second), version=version, key=key: all(
                    (found := cache.get(key)) and found.metadata.resourceVersion == version.resourceVersion
                    for cache in caches
                ),
                20,
            )
            assert isinstance(second.get(key), ConfigMap) == full
            await cancel(running)
        assert await client.delete(ConfigMap, "shared", NAMESPACE)


async def test_the_real_server_and_the_double_respond_equally(api: Cluster) -> None:
    async with connected(api) as client:
        created = await client.apply(text("t", a="1"))
        assert created.metadata
        assert created.metadata.managedFields
        assert created.metadata.managedFields[0].manager == "test"
        stale = created.metadata.resourceVersion
        await client.patch(ConfigMap, "t", {"data": {"b": "2"}}, namespace=NAMESPACE)
        changed = await client.patch(ConfigMap, "t", [{"op": "remove", "path": "/data/a"}], namespace=NAMESPACE)
        assert changed.data == {"b": "2"}
        old = text("t")
        assert old.metadata
        old.metadata.resourceVersion = stale
        with pytest.raises(Conflict):
            await client.replace(old)
        with pytest.raises(StatusError, match="Invalid"):
            await client.create(text("Not A Name"))
        assert not await client.delete(ConfigMap, "none", NAMESPACE)
        with pytest.raises(Conflict):
            await client.delete(ConfigMap, "t", NAMESPACE, uid="another")
        assert await client.delete(ConfigMap, "t", NAMESPACE)


async def test_a_dry_run_stores_nothing_and_names_are_escaped(api: Cluster) -> None:
    async with connected(api) as client:
        created = await client.create(text("dry", a="1"))
        assert (await client.apply(text("dry", a="2"), dry_run=True)).data == {"a": "2"}
        assert (await client.replace(text("dry", a="2"), dry_run=True)).data == {"a": "2"}
        patched = await client.patch(ConfigMap, "dry", {"data": {"a": "2"}}, namespace=NAMESPACE, dry_run=True)
        assert patched.data == {"a": "2"}
        assert await client.create(text("dry-other"), dry_run=True)
        with pytest.raises(StatusError, match="Invalid"):
            await client.create(text("Not A Name"), dry_run=True)
        assert await client.delete(ConfigMap, "dry", NAMESPACE, dry_run=True)
        for name in ("dry#x", "dry?x", "dry x"):
            assert not await client.delete(ConfigMap, name, NAMESPACE)
        assert (await client.get(ConfigMap, "dry", NAMESPACE)) == created
        with pytest.raises(NotFound):
            await client.get(ConfigMap, "dry-other", NAMESPACE)
        assert await client.delete(ConfigMap, "dry", NAMESPACE)


async def test_an_eviction_and_a_token_are_subresources(api: Cluster) -> None:
    async with connected(api) as client:
        container = Container(name="c", image="none")
        spec = PodSpec(containers=[container], nodeName="none", automountServiceAccountToken=False)
        pod = Pod(metadata=ObjectMeta(name="evicted", namespace=NAMESPACE), spec=spec)
        await until(lambda: api.get(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default") is not None, 30)
        await client.create(pod)
        await client.create(PodEviction(metadata=ObjectMeta(name="evicted", namespace=NAMESPACE)), dry_run=True)
        found = await client.get(Pod, "evicted", NAMESPACE)
        assert found.metadata
        assert found.metadata.deletionTimestamp is None
        await client.create(PodEviction(metadata=ObjectMeta(name="evicted", namespace=NAMESPACE)))
        found = await client.get(Pod, "evicted", NAMESPACE)
        assert found.metadata
        assert found.metadata.deletionTimestamp is not None
        token = ServiceAccountToken(
            metadata=ObjectMeta(name="default", namespace=NAMESPACE), spec=TokenRequestSpec(audiences=[])
        )
        assert (await client.create(token)).status
        await client.patch(Pod, "evicted", {"status": {"message": "m"}}, namespace=NAMESPACE, subresource="status")
        assert (await client.get(Pod, "evicted", NAMESPACE)).status.message == "m"  # pyright: ignore[reportOptionalMemberAccess]


async def change_others(client: Client) -> None:
    """Changes another object of the kind, so that an idle selection gets bookmarks."""
    for number in range(1000):
        metadata = ObjectMeta(name="other", namespace=NAMESPACE)
        await client.apply(ConfigMap(metadata=metadata, data={"number": str(number)}))
        await asyncio.sleep(0.2)


async def test_bookmarks_are_sent_and_lists_come_in_pages(api: Cluster) -> None:
    async with connected(api) as client:
        for number in range(7):
            await client.apply(text(f"page-{number}"))
        listing = await client.list(ConfigMap, LABELED, page=3)
        assert len(listing.items) == 7
        names: set[str] = set()
        watch = client.watch(ConfigMap, LABELED, listing.resource_version, duration=4, idle=30)
        others = asyncio.create_task(change_others(client))
        async for event in watch:
            names.add(event.type)
        others.cancel()
        assert names == {"BOOKMARK"}
        for number in range(7):
            await client.delete(ConfigMap, f"page-{number}", NAMESPACE)


async def test_a_cache_lists_again_after_compaction(api: Cluster) -> None:
    watch_timeouts = WatchTimeouts(idle=30, duration=60, first_delay=0.1, max_delay=1)
    async with connected(api) as client:
        await client.apply(text("stays"))
        await client.apply(text("goes"))
        informer = Informer(client, LABELED, watch_timeouts=watch_timeouts)
        cache = informer.cache(ConfigMap)
        first = asyncio.create_task(informer.run())
        async with asyncio.timeout(20):
            await cache.synced.wait()
        first.cancel()
        version = next(iter(cache)).metadata
        assert version
        await client.delete(ConfigMap, "goes", NAMESPACE)
        await client.apply(text("new"))
        await asyncio.to_thread(compact, api)
        await asyncio.to_thread(api.apiserver.kill)
        await asyncio.to_thread(api.apiserver.start)
        with pytest.raises(Gone):
            async for _ in client.watch(ConfigMap, LABELED, version.resourceVersion or "", duration=10, idle=30):
                pass
        events: list[tuple[Any, Any]] = []
        cache.subscribe(lambda old, new: events.append((old and old.metadata.name, new and new.metadata.name)))  # pyright: ignore[reportOptionalMemberAccess]
        del events[:]
        again = asyncio.create_task(informer.run())
        await until(lambda: cache.get(Request("new", NAMESPACE)) is not None, 20)
        assert sorted(events, key=str) == [("goes", None), (None, "new")]
        again.cancel()
        for name in ("stays", "new"):
            await client.delete(ConfigMap, name, NAMESPACE)


async def test_a_cache_recovers_from_a_server_that_stops_responding(api: Cluster) -> None:
    watch_timeouts = WatchTimeouts(idle=2, duration=60, first_delay=0.1, max_delay=1)
    async with connected(api) as client:
        informer = Informer(client, LABELED, watch_timeouts=watch_timeouts)
        cache = informer.cache(ConfigMap)
        running = asyncio.create_task(informer.run())
        async with asyncio.timeout(20):
            await cache.synced.wait()
        await client.apply(text("before"))
        await until(lambda: len(cache) == 1)
        with api.apiserver.suspended():
            await asyncio.sleep(5)
        await client.apply(text("after"))
        await until(lambda: len(cache) == 2, 30)
        assert not running.done()
        running.cancel()
        for name in ("before", "after"):
            await client.delete(ConfigMap, name, NAMESPACE)


async def test_a_second_program_leads_after_the_first_is_killed(api: Cluster) -> None:
    with program(api, "first") as first, program(api, "second") as second:
        await until(lambda: holder(api) in {"first", "second"}, 30)
        leader = holder(api)
        await asyncio.to_thread(create_greeting, api, "a", leader)
        await asyncio.to_thread(wait_text, api, "a", f"Hello, {leader}!")
        (first if leader == "first" else second).kill()
        await asyncio.to_thread(create_greeting, api, "a", "heir")
        await asyncio.to_thread(wait_text, api, "a", "Hello, heir!")
        assert holder(api) == {"first": "second", "second": "first"}[leader]
    api.request("DELETE", f"{GREETINGS}/a")


async def test_programs_outlast_the_api_server_but_a_leader_ends(api: Cluster) -> None:
    with program(api, "leader") as leader, program(api) as free:
        await until(lambda: holder(api) == "leader", 30)
        await asyncio.to_thread(create_greeting, api, "b", "you")
        await asyncio.to_thread(wait_text, api, "b", "Hello, you!")
        await asyncio.to_thread(api.apiserver.kill)
        away = time.monotonic()
        try:
            status = await asyncio.to_thread(leader.wait, 15)
            await asyncio.sleep(max(0.0, away + 20 - time.monotonic()))
        finally:
            await asyncio.to_thread(api.apiserver.start)
        assert status == 1
        assert free.poll() is None
        await asyncio.to_thread(create_greeting, api, "b", "again")
        await asyncio.to_thread(wait_text, api, "b", "Hello, again!", 60)
        assert free.poll() is None
    api.request("DELETE", f"{GREETINGS}/b")


async def test_the_lease_is_one_that_other_programs_understand(api: Cluster) -> None:
    async with connected(api) as client:
        elector = LeaderElector(client, Election.of("written", "default"))
        async with asyncio.timeout(30):
            await elector.acquire()
        spec = (api.get(f"{LEASES}/written") or {})["spec"]
        assert spec["leaseDurationSeconds"] == 15
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"])
        await elector.release()
        assert json.dumps(api.get(f"{LEASES}/written")).count(elector.election.identity) == 0


RBAC = "rbac.authorization.k8s.io"


def account(cluster: Cluster, name: str, *rules: dict[str, Any]) -> str:
    """The token of a service account with these rights in the cluster."""
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    items = [
        (accounts, {"metadata": {"name": name}}),
        (f"/apis/{RBAC}/v1/clusterroles", {"metadata": {"name": name}, "rules": rules}),
        (
            f"/apis/{RBAC}/v1/clusterrolebindings",
            {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
            },
        ),
    ]
    for path, thing in items:
        status, answer = cluster.request("POST", path, thing)
        assert status == 201, answer
    status, answer = cluster.request("POST", f"{accounts}/{name}/token", {"spec": {}})
    assert status == 201, answer
    return answer["status"]["token"]


def client_as(cluster: Cluster, token: str) -> Client:
    config = load_config(str(cluster.kubeconfig))
    config = structs.replace(config, certificate=None, token=token.encode())
    return Client(config, field_manager="test")


def rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs}


async def test_pages_are_served_to_clients_authorized_by_cluster_roles(api: Cluster) -> None:
    reader = account(api, "reader", {"nonResourceURLs": ["/metrics"], "verbs": ["get"]})
    other = account(api, "other")
    asker = account(
        api,
        "asker",
        rule("authentication.k8s.io", "tokenreviews", "create"),
        rule("authorization.k8s.io", "subjectaccessreviews", "create"),
    )

    async def status(client: Client, token: str) -> int:
        page = Authorized(client.server, lambda _request: Response(200, b""))
        try:
            return (await page(HttpRequest("GET", "/metrics", "", b"", f"Bearer {token}"))).status
        except HttpError as error:
            return error.status

    client, powerless = client_as(api, asker), client_as(api, other)
    try:
        # The account may exist before its role takes effect.
        await until(lambda: reads(status(client, reader)), 20)
        assert [await status(client, token) for token in (other, "junk", reader[:-4])] == [403, 401, 401]
        assert await status(powerless, reader) == 500
    finally:
        await client.close()
        await powerless.close()


async def reads(coming: Coroutine[Any, Any, int]) -> bool:
    return await coming == 200


async def test_events_of_the_clusters_objects_need_a_role_in_one_namespace_only(
    api: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_as(api, account(api, "teller"))
    roles = f"/apis/{RBAC}/v1/namespaces/default"
    events = "/apis/events.k8s.io/v1/namespaces/default/events?fieldSelector=regarding.kind%3DNamespace"
    recorder = Recorder(client, "test", "here")
    try:
        async with connected(api) as powerful:
            namespace = await powerful.get(NamespaceObject, NAMESPACE)
        recorder.record(namespace, "Normal", "Forbidden", "x")
        await recorder.flush()
        assert "no events are written in namespace default" in caplog.text
        for path, thing in (
            ("roles", {"metadata": {"name": "teller"}, "rules": [rule("events.k8s.io", "events", "create", "patch")]}),
            (
                "rolebindings",
                {
                    "metadata": {"name": "teller"},
                    "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": "teller"},
                    "subjects": [{"kind": "ServiceAccount", "name": "teller", "namespace": NAMESPACE}],
                },
            ),
        ):
            assert api.request("POST", f"{roles}/{path}", thing)[0] == 201

        async def counted() -> bool:
            recorder.record(namespace, "Normal", "Told", "x")
            await recorder.flush()
            found = (api.get(events) or {"items": []})["items"]
            return any((one.get("series") or {}).get("count", 0) > 1 for one in found)

        await until(counted, 20)
    finally:
        await client.close()
