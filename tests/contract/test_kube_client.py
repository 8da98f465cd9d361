"""Requests to valid and invalid API servers."""

import asyncio
import contextlib
import re
from typing import ClassVar

import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget, WidgetSpec, WidgetStatus, widget
from msgspec import Struct
from waiting import until

from accelplane.apiserver import ClientConfig, RateLimit, errors
from accelplane.kube.client import Client, Selection, Watched
from accelplane.kube.metrics import Metrics
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, NamespacedResource, ResourceDef
from accelplane.kube.objects import api as api_info


async def events(client: Client, since: str = "100", *, idle: float = 5, duration: float = 60) -> list[Watched]:
    """All events of a watch until the server ends it."""
    watch = client.watch(Widget, Selection(), since, duration=duration, idle=idle)
    return [event async for event in watch]


async def test_an_object_is_created_read_changed_and_deleted(api: KubeApi, client: Client) -> None:
    created = await client.create(Widget(metadata=Metadata(name="w"), spec=WidgetSpec(size=1)))
    assert created.metadata.uid
    created.spec.size = 2
    await client.replace(created)
    read = await client.get(Widget, "w")
    assert read.spec.size == 2
    read.status = WidgetStatus(done=2)
    read.spec.size = 77
    await client.replace(read, subresource="status")
    stored = api.objects["widgets", "", "w"]
    del stored["metadata"]["managedFields"]
    assert stored == {
        "apiVersion": "example.com/v1",
        "kind": "Widget",
        "spec": {"size": 2},
        "status": {"done": 2},
        "metadata": {
            "name": "w",
            "uid": created.metadata.uid,
            "resourceVersion": str(api.version),
            "creationTimestamp": created.metadata.creationTimestamp,
            "generation": 2,
        },
    }
    assert await client.delete(Widget, "w")
    assert not await client.delete(Widget, "w")


async def test_apply_sends_the_field_manager_and_forces_conflicts(api: KubeApi, client: Client) -> None:
    created = await client.apply(Config(metadata=Metadata(name="c", namespace="n"), data={"a": "b"}))
    assert created.data == {"a": "b"}
    request = api.requests[-1]
    assert request.content_type == "application/apply-patch+yaml"
    assert request.parameters == {"fieldManager": "test", "force": "true"}
    assert request.body["kind"] == "ConfigMap"


async def test_a_mapping_is_a_merge_patch_and_a_sequence_a_json_patch(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("w"))
    assert (await client.patch(Widget, "w", {"spec": {"size": 3}})).spec.size == 3
    api.fault("PATCH", 422)
    with pytest.raises(errors.StatusError):
        await client.patch(Widget, "w", [{"op": "add", "path": "/spec/size", "value": 4}])
    assert [request.content_type.partition("/")[2] for request in api.requests] == [
        "merge-patch+json",
        "json-patch+json",
    ]


class Eviction(NamespacedResource, Struct, omit_defaults=True):
    """A subresource with a kind of its own."""

    _api_info: ClassVar[ApiInfo] = api_info(
        "policy", "v1", "Eviction", "pods", parent=ResourceDef("", "v1", "Pod"), action="eviction"
    )
    metadata: Metadata


async def test_a_subresource_with_a_kind_of_its_own_is_created_below_its_object(api: KubeApi, client: Client) -> None:
    api.fault("POST", 201, body=b'{"metadata": {"name": "p"}}')
    await client.create(Eviction(Metadata(name="p", namespace="n")))
    assert str(api.requests[-1]) == "POST /api/v1/namespaces/n/pods/p/eviction"
    assert (api.requests[-1].body["apiVersion"], api.requests[-1].body["kind"]) == ("policy/v1", "Eviction")
    api.fault("POST", 201, body=b'{"metadata": {"name": "w"}}')
    await client.create(Widget(metadata=Metadata(name="w")), subresource="token")
    assert str(api.requests[-1]) == "POST /apis/example.com/v1/widgets/w/token"


async def test_all_writes_have_subresources_and_a_dry_run_that_stores_nothing(api: KubeApi, client: Client) -> None:
    created = await client.create(Widget(metadata=Metadata(name="w"), spec=WidgetSpec(size=1)))
    version = api.version
    changed = Widget(
        metadata=Metadata(name="w", resourceVersion=created.metadata.resourceVersion), spec=WidgetSpec(size=2)
    )
    widget_object = Widget(metadata=Metadata(name="w"), spec=WidgetSpec(size=2))
    assert (await client.replace(changed, dry_run=True)).spec.size == 2
    assert (await client.apply(widget_object, dry_run=True)).spec.size == 2
    assert (await client.patch(Widget, "w", {"spec": {"size": 2}}, dry_run=True)).spec.size == 2
    assert (await client.replace(changed, subresource="status", dry_run=True)).spec.size == 1
    assert await client.create(Widget(metadata=Metadata(name="v")), dry_run=True)
    assert await client.delete(Widget, "w", dry_run=True)
    assert (api.version, (await client.get(Widget, "w")).spec.size) == (version, 1)
    await client.apply(Widget(metadata=Metadata(name="w"), status=WidgetStatus(done=1)), subresource="status")
    await client.patch(Widget, "w", {"status": {"done": 2}}, subresource="status")
    assert [str(each) for each in api.requests[-2:]] == ["PATCH /apis/example.com/v1/widgets/w/status"] * 2


@pytest.mark.parametrize("name", ["x#y", "x?y", "x%2fy", "x y"])
async def test_a_name_with_path_characters_never_selects_another_object(
    api: KubeApi, client: Client, name: str
) -> None:
    api.put("widgets", widget("x"))
    assert not await client.delete(Widget, name)
    assert ("widgets", "", "x") in api.objects
    with pytest.raises(errors.NotFound):
        await client.patch(Widget, name, {"spec": {"size": 3}})
    with pytest.raises(ValueError, match="expected a name without /"):
        await client.delete(Widget, f"{name}/..")


async def test_requests_wait_for_the_rate_limit_unless_the_client_is_without(api: KubeApi) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    limit = RateLimit(20, 30, clock=lambda: 0.0, sleep=sleep)
    client = Client(api.config, field_manager="test", rate_limit=limit)
    api.put("widgets", widget("w"))
    for _ in range(40):
        await client.get(Widget, "w")
    assert waits == pytest.approx([number / 20 for number in range(1, 11)])
    for _ in range(10):
        await client.without_rate_limit().get(Widget, "w")
    assert len(waits) == 10
    await client.close()


async def test_deleting_spares_an_object_of_the_same_name(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("w"))
    with pytest.raises(errors.Conflict):
        await client.delete(Widget, "w", uid="another")
    assert api.get("widgets", "w")


async def test_long_lists_come_in_pages(api: KubeApi, client: Client) -> None:
    for number in range(25):
        api.put("widgets", widget(f"w{number:02}"))
    listing = await client.list(Widget, page=10)
    assert [item.metadata.name for item in listing.items] == [f"w{number:02}" for number in range(25)]
    assert listing.resource_version == str(api.version)
    assert api.count("GET") == 3


async def test_each_page_of_a_list_is_consumed_before_the_next_one_is_requested(api: KubeApi, client: Client) -> None:
    for number in range(5):
        api.put("widgets", widget(f"w{number}"))
    pages: list[tuple[int, int]] = []
    version = await client.list_pages(
        Widget, Selection(), lambda raws: pages.append((len(raws), api.count("GET"))), page=2
    )
    assert pages == [(2, 1), (2, 2), (1, 3)]
    assert version == str(api.version)


class Outline(GlobalResource, Struct):
    """Only the metadata of a widget."""

    _api_info: ClassVar[ApiInfo] = api_info("example.com", "v1", "Widget", "widgets")
    metadata: Metadata


async def test_for_a_metadata_only_kind_only_metadata_is_requested(api: KubeApi, client: Client) -> None:
    created = api.put("widgets", widget("w"))
    assert (await client.get(Outline, "w")).metadata.uid == created["metadata"]["uid"]
    await client.list(Outline)
    async with contextlib.aclosing(client.watch(Outline, Selection(), "100", duration=60, idle=5)) as watch:
        await anext(watch)
    await client.get(Widget, "w")
    partial = [re.findall("as=([^;]+);g=meta.k8s.io;v=v1", request.accept) for request in api.requests]
    assert partial == [["PartialObjectMetadata"], ["PartialObjectMetadataList"], ["PartialObjectMetadata"], []]
    # the response of an older server or a proxy
    assert all("application/json;q=0.5" in request.accept for request in api.requests[:3])


async def test_an_empty_list_may_be_null(client: Client) -> None:
    assert (await client.list(Widget)).items == []


async def test_one_object_that_cannot_be_decoded_hides_no_others(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("a"))
    api.put("widgets", {"metadata": {"name": "b"}, "spec": {"size": "large"}})
    api.put("widgets", widget("c"))
    listing = await client.list(Widget)
    assert [item.metadata.name for item in listing.items] == ["a", "c"]
    assert [why for _, why in listing.unreadable] == ["Expected `int`, got `str` - at `$.spec.size`"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, errors.NotFound),
        (409, errors.Conflict),
        (410, errors.Gone),
        (429, errors.TooManyRequests),
        (500, errors.StatusError),
        (503, errors.StatusError),
        (302, errors.StatusError),
    ],
)
async def test_each_status_has_its_own_exception(
    api: KubeApi, client: Client, status: int, error: type[errors.StatusError]
) -> None:
    api.fault("GET", status, headers={"Retry-After": "12"})
    with pytest.raises(error, match=f"GET /apis/example.com/v1/widgets/w: {status}") as raised:
        await client.get(Widget, "w")
    assert raised.type is error
    assert raised.value.retry_after == 12


@pytest.mark.parametrize(
    ("header", "body"),
    [("86400", b""), ("999999999999", b""), ("", b'{"details": {"retryAfterSeconds": 86400}}')],
)
async def test_a_delay_that_the_server_requests_has_a_limit(
    api: KubeApi, client: Client, header: str, body: bytes
) -> None:
    """Caches, controllers and repeated requests wait this long; one wrong answer of a proxy must not stop them."""
    api.fault("GET", 429, headers={"Retry-After": header} if header else {}, body=body)
    with pytest.raises(errors.TooManyRequests) as raised:
        await client.get(Widget, "w")
    assert raised.value.retry_after == errors.MAX_RETRY_AFTER == 60


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[]", b"{}", b'{"metadata": 3}', b'{"metadata": {"name": "w"}'])
async def test_invalid_data_is_a_decode_error(api: KubeApi, client: Client, body: bytes) -> None:
    api.fault("GET", 200, body=body)
    with pytest.raises(errors.DecodeError, match="expected Widget in JSON"):
        await client.get(Widget, "w")


async def test_a_server_that_does_not_answer_is_unreachable(api: KubeApi) -> None:
    client = Client(api.config, field_manager="test", timeout=0.1)
    api.fault("GET", hang=True)
    with pytest.raises(errors.Unreachable, match=r"no complete response within 0\.1 s"):
        await client.get(Widget, "w")
    await client.close()


async def test_a_connection_that_breaks_is_unreachable_and_the_next_one_works(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("w"))
    api.fault("GET")
    with pytest.raises(errors.Unreachable, match=api.address):
        await client.get(Widget, "w")
    assert await client.get(Widget, "w")


async def test_a_missing_server_is_unreachable(api: KubeApi, client: Client) -> None:
    await api.stop()
    with pytest.raises(errors.Unreachable, match=f"{api.address}: "):
        await client.get(Widget, "w")


async def test_a_watch_returns_events_and_requests_bookmarks(api: KubeApi, client: Client) -> None:
    api.bookmark_interval = 0.01
    api.put("widgets", widget("w"))
    kinds = [event.type for event in await events(client, duration=1)]
    assert kinds[0] == "ADDED"
    assert set(kinds[1:]) == {"BOOKMARK"}
    assert api.requests[-1].parameters["allowWatchBookmarks"] == "true"


async def test_an_idle_watch_times_out(api: KubeApi, client: Client) -> None:
    api.silent = True
    with pytest.raises(errors.WatchIdleTimeout, match=r"received nothing for 0\.1 s"):
        await events(client, idle=0.1)


async def test_a_watch_from_an_expired_version_gets_410(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("w"))
    api.compact()
    with pytest.raises(errors.Gone):
        await events(client)
    api.fault("WATCH", 410)
    with pytest.raises(errors.Gone):
        await events(client, str(api.version))


@pytest.mark.parametrize("line", [b"junk", b"{}", b'{"type": "ODD", "object": {}}', b'{"type": "ADDED"}', b"\xff"])
async def test_invalid_data_in_a_watch_is_a_decode_error(api: KubeApi, client: Client, line: bytes) -> None:
    watching = asyncio.create_task(events(client))
    await until(lambda: api.open_watches == 1)
    api.send(line)
    with pytest.raises(errors.DecodeError, match=r"WATCH /apis/example\.com/v1/widgets: "):
        await watching


async def test_requests_are_counted_by_status(api: KubeApi) -> None:
    metrics = Metrics()
    client = Client(api.config, field_manager="test", metrics=metrics)
    await client.list(Widget)
    with pytest.raises(errors.NotFound):
        await client.get(Widget, "w")
    counted = {
        sample.labels["code"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "rest_client_requests_total"
    }
    assert counted == {"200": 1, "404": 1}
    await client.close()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ClientConfig(server="http://[::1"), r"found 'http://\[::1', expected https://host:port"),
        (ClientConfig(server="https://a", authority="/no/ca.crt"), "/no/ca.crt: No such file"),
        (ClientConfig(server="https://a", authority=b"AAAA"), "inline data.*: expected certificates in PEM"),
        (ClientConfig(server="https://a", certificate=("/no/crt", "/no/key")), "/no/crt: No such file"),
        (ClientConfig(server="http://a", token=b"two words"), "inline data.*: found 9 bytes that are not a token"),
    ],
)
def test_an_unusable_configuration_fails_immediately(config: ClientConfig, text: str) -> None:
    with pytest.raises(errors.NoCredentials, match=text):
        Client(config, field_manager="test")
