"""Informers and caches with a server whose watches end, break, become idle, send invalid data and expire."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget, widget
from waiting import until
from widgetcaches import HASTE, names, wait_synced, widgets

from accelplane.apiserver import StatusError
from accelplane.kube.cache import Cache, UnreadableObject
from accelplane.kube.client import Client, Selection
from accelplane.kube.informer import Informer
from accelplane.kube.metrics import Metrics
from accelplane.kube.objects import ApiInfo, GlobalResource, Metadata, Request
from accelplane.kube.objects import api as api_info


async def test_a_cache_follows_the_server(api: KubeApi) -> None:
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        assert names(cache) == ["a"]
        api.put("widgets", widget("b"))
        api.put("widgets", widget("a", size=5))
        await until(lambda: len(cache) == 2)
        thing = cache.get(Request("a"))
        assert thing
        assert thing.spec.size == 5
        api.remove("widgets", "a")
        await until(lambda: names(cache) == ["b"])
        assert cache.get(Request("a")) is None


async def test_run_when_permitted_waits_for_the_right_to_list(api: KubeApi, client: Client) -> None:
    forbidden = api.fault("GET .*/widgets", 403, times=1_000_000)
    api.put("widgets", widget("a"))
    refused: list[StatusError] = []
    informer = Informer(client, watch_timeouts=HASTE)
    cache = informer.cache(Widget)
    running = asyncio.create_task(informer.run_when_permitted(refused.append, retry=0.02))
    await until(lambda: api.count("GET .*/widgets") > 3)
    assert [error.code for error in refused] == [403]
    assert not cache.synced.is_set()
    forbidden.times = 0
    await wait_synced(cache, api)
    assert names(cache) == ["a"]
    running.cancel()


async def test_run_when_permitted_recognizes_a_missing_right_after_another_error(api: KubeApi, client: Client) -> None:
    api.fault("GET .*/widgets", 500, times=2)
    api.fault("GET .*/widgets", 403, times=1_000_000)
    refused: list[StatusError] = []
    informer = Informer(client, watch_timeouts=HASTE)
    informer.cache(Widget)
    running = asyncio.create_task(informer.run_when_permitted(refused.append, retry=3600))
    await until(informer.initialized.is_set)
    assert [error.code for error in refused] == [403]
    assert api.count("GET .*/widgets") == 3
    running.cancel()


@pytest.mark.parametrize("code", [403, 404])
async def test_run_while_served_empties_the_caches_when_the_server_rejects_lists(
    api: KubeApi, client: Client, code: int
) -> None:
    unserved = api.fault("/widgets", code, times=1_000_000)
    api.put("widgets", widget("a"))
    rejections: list[StatusError] = []
    changes: list[tuple[bool, bool]] = []
    informer = Informer(client, watch_timeouts=HASTE)
    cache = informer.cache(Widget)
    cache.subscribe(lambda old, new: changes.append((old is not None, new is not None)))
    running = asyncio.create_task(informer.run_while_served(rejections.append, retry=0.02))
    await until(lambda: len(rejections) > 3)
    assert not cache.synced.is_set()
    unserved.times = 0
    await wait_synced(cache, api)
    assert names(cache) == ["a"]
    unserved = api.fault("/widgets", code, times=1_000_000)
    api.abort_watches()
    await until(lambda: not names(cache))
    assert {error.code for error in rejections} == {code}
    unserved.times = 0
    await until(lambda: names(cache) == ["a"])
    assert changes == [(False, True), (True, False), (False, True)]
    assert not running.done()
    running.cancel()


async def test_run_while_served_retries_other_errors_soon_and_keeps_the_caches(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("a"))
    rejections: list[StatusError] = []
    informer = Informer(client, watch_timeouts=HASTE)
    cache = informer.cache(Widget)
    running = asyncio.create_task(informer.run_while_served(rejections.append, retry=3600))
    await wait_synced(cache, api)
    api.fault("/widgets", 500, times=2)
    api.abort_watches()
    api.put("widgets", widget("b"))
    await until(lambda: names(cache) == ["a", "b"])
    assert rejections == []
    running.cancel()


async def test_subscribers_get_each_change_once_with_the_old_object(api: KubeApi) -> None:
    events: list[tuple[int | None, int | None]] = []

    def listen(old: Widget | None, new: Widget | None) -> None:
        events.append((old.spec.size if old else None, new.spec.size if new else None))

    api.put("widgets", widget("a", size=1))
    async with widgets(api) as cache:
        cache.subscribe(listen)
        await wait_synced(cache, api)
        api.put("widgets", widget("a", size=2))
        api.remove("widgets", "a")
        await until(lambda: len(events) == 3)
        assert events == [(None, 1), (1, 2), (2, None)]


async def test_a_late_subscriber_gets_all_objects(api: KubeApi) -> None:
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        events: list[Widget | None] = []
        cache.subscribe(lambda old, new: events.append(new))
        assert events == list(cache)


async def test_a_cache_has_the_selected_objects_only(api: KubeApi) -> None:
    api.put("widgets", widget("a", color="red"))
    api.put("widgets", widget("b", color="blue"))
    async with widgets(api, Selection(labels="color=red")) as cache:
        await wait_synced(cache, api)
        assert names(cache) == ["a"]
        api.put("widgets", widget("b", color="red"))
        api.put("widgets", widget("a", color="blue"))
        await until(lambda: names(cache) == ["b"])


async def test_indexes_follow_changes(api: KubeApi) -> None:
    api.put("widgets", widget("a", size=1))
    async with widgets(api) as cache:
        cache.add_index("size", lambda thing: [str(thing.spec.size)])
        await wait_synced(cache, api)
        api.put("widgets", widget("b", size=1))
        await until(lambda: [one.metadata.name for one in cache.by_index("size", "1")] == ["a", "b"])
        api.put("widgets", widget("a", size=2))
        await until(lambda: [one.metadata.name for one in cache.by_index("size", "2")] == ["a"])
        api.remove("widgets", "b")
        await until(lambda: not cache.by_index("size", "1"))
        cache.add_index("name", lambda thing: [thing.metadata.name or ""])
        assert cache.by_index("name", "a") == list(cache)


async def test_an_unreadable_object_is_not_absent(api: KubeApi) -> None:
    api.put("widgets", {"metadata": {"name": "bad"}, "spec": {"size": "large"}})
    api.put("widgets", widget("turns"))
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        with pytest.raises(UnreadableObject, match="Widget bad: Expected `int`"):
            cache.get(Request("bad"))
        assert cache.requests() == [Request("turns"), Request("bad")]
        api.put("widgets", {"metadata": {"name": "turns"}, "spec": 7})
        api.put("widgets", widget("bad", size=1))
        await until(lambda: "bad" in names(cache))
        with pytest.raises(UnreadableObject, match="Widget turns"):
            cache.get(Request("turns"))
        api.remove("widgets", "turns")
        await until(lambda: cache.requests() == [Request("bad")])
        assert cache.get(Request("turns")) is None


async def test_transform_removes_fields_before_objects_are_stored(api: KubeApi) -> None:
    api.put("configmaps", {"metadata": {"name": "c", "namespace": "n"}, "data": {"large": "x" * 1000, "small": "y"}})

    def small(thing: Config) -> None:
        thing.data = {"small": thing.data["small"]}

    client = Client(api.config, field_manager="test")
    informer = Informer(client, Selection(namespace="n"))
    cache = informer.cache(Config, transform=small)
    running = asyncio.create_task(informer.run())
    async with asyncio.timeout(5):
        await cache.synced.wait()
    assert [thing.data for thing in cache] == [{"small": "y"}]
    running.cancel()
    await client.close()


async def test_after_a_malformed_update_all_readers_agree(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.put("widgets", widget("w", size=1))
    async with widgets(api) as cache:
        changes: list[tuple[int | None, int | None]] = []
        unreadable: list[Request] = []
        cache.add_index("size", lambda thing: [str(thing.spec.size)])
        cache.subscribe(
            lambda old, new: changes.append((old and old.spec.size, new and new.spec.size)),
            on_unreadable=unreadable.append,
        )
        await wait_synced(cache, api)
        api.put("widgets", {"metadata": {"name": "w"}, "spec": {"size": "large"}})
        await until(lambda: Request("w") in cache.unreadable)
        with pytest.raises(UnreadableObject, match="Widget w: Expected `int`"):
            cache.get(Request("w"))
        assert (list(cache), len(cache), cache.by_index("size", "1")) == ([], 0, [])
        assert cache.requests() == [Request("w")]
        assert changes == [(None, 1), (1, None)]
        assert unreadable == [Request("w")]
        late: list[Request] = []
        cache.subscribe(lambda _old, _new: None, on_unreadable=late.append)
        assert late == [Request("w")]
        api.put("widgets", {"metadata": {"name": "w", "labels": {"a": "b"}}, "spec": {"size": "large"}})
        await until(lambda: len(unreadable) == 2)
        assert caplog.text.count("Widget w: cannot be decoded") == 1
        api.put("widgets", widget("w", size=2))
        await until(lambda: changes[2:] == [(None, 2)])
        found = cache.get(Request("w"))
        assert found
        assert cache.by_index("size", "2") == [found]


async def test_subscribers_are_notified_of_the_deletion_of_an_unreadable_object(api: KubeApi) -> None:
    api.put("widgets", {"metadata": {"name": "w"}, "spec": 7})
    async with widgets(api) as cache:
        unreadable: list[Request] = []
        cache.subscribe(lambda _old, _new: None, on_unreadable=unreadable.append)
        await wait_synced(cache, api)
        assert unreadable == [Request("w")]
        api.remove("widgets", "w")
        await until(lambda: unreadable == [Request("w"), Request("w")])
        assert cache.get(Request("w")) is None


async def test_an_object_that_is_malformed_after_an_outage_is_not_absent(api: KubeApi) -> None:
    api.put("widgets", widget("turns"))
    api.put("widgets", {"metadata": {"name": "stays"}, "spec": 7})
    api.put("widgets", {"metadata": {"name": "goes"}, "spec": 7})
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        await api.stop()
        api.put("widgets", {"metadata": {"name": "turns"}, "spec": 7})
        api.remove("widgets", "goes")
        api.compact()
        await api.start()
        await until(lambda: set(cache.unreadable) == {Request("turns"), Request("stays")})
        for name in ("turns", "stays"):
            with pytest.raises(UnreadableObject):
                cache.get(Request(name))
        assert set(cache.requests()) == {Request("turns"), Request("stays")}
        assert cache.get(Request("goes")) is None


class Outline(GlobalResource, msgspec.Struct):
    """The metadata of a widget."""

    _api_info: ClassVar[ApiInfo] = api_info("example.com", "v1", "Widget", "widgets")
    metadata: Metadata


def accepted(api: KubeApi) -> set[bool]:
    """Whether requests asked for metadata only."""
    return {"PartialObjectMetadata" in request.accept for request in api.requests}


@asynccontextmanager
async def shared(api: KubeApi, *kinds: type[Any]) -> AsyncIterator[list[Cache[Any]]]:
    client = Client(api.config, field_manager="test", timeout=1)
    informer = Informer(client, watch_timeouts=HASTE)
    caches: list[Cache[Any]] = [informer.cache(kind) for kind in kinds]
    running = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(30):
            await informer.synced.wait()
        yield caches
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def test_caches_of_two_types_share_one_watch(api: KubeApi) -> None:
    api.put("widgets", widget("a", size=1))
    async with shared(api, Outline, Widget) as (outlines, whole):
        await until(lambda: api.open_watches == 1)
        assert (api.count("GET /apis"), api.count("WATCH")) == (1, 1)
        assert accepted(api) == {False}
        assert [type(each) for each in (*outlines, *whole)] == [Outline, Widget]
        api.put("widgets", {"metadata": {"name": "a"}, "spec": 7})
        await until(lambda: Request("a") in whole.unreadable)
        assert [each.metadata.name for each in outlines] == ["a"]
        api.remove("widgets", "a")
        await until(lambda: not outlines.requests() and not whole.requests())
        assert (api.count("GET /apis"), api.count("WATCH")) == (1, 1)


async def test_only_metadata_is_requested_if_no_cache_reads_more(api: KubeApi) -> None:
    async with shared(api, Outline, Outline):
        await until(lambda: api.open_watches == 1)
        assert accepted(api) == {True}


async def test_an_informer_rejects_late_caches_other_resources_and_a_second_run(client: Client) -> None:
    informer = Informer(client)
    informer.cache(Widget)
    with pytest.raises(ValueError, match="widgets: expected another type of this resource, found /api/v1/configmaps"):
        informer.cache(Config)
    running = asyncio.create_task(informer.run())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="widgets: cannot add a cache to a running informer"):
        informer.cache(Widget)
    with pytest.raises(RuntimeError, match="widgets: already running"):
        await informer.run()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(RuntimeError, match="informer without a cache"):
        await Informer(client).run()


def gauges(metrics: Metrics) -> dict[str, float]:
    """The samples of caches of widgets, by name without the prefix."""
    return {
        sample.name.removeprefix("accelplane_cache_"): sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name.startswith("accelplane_cache_") and sample.labels["resource"] == "widgets.example.com"
    }


async def test_metrics_show_the_state_of_a_cache_while_it_runs(api: KubeApi, client: Client) -> None:
    api.put("widgets", widget("a"))
    api.put("widgets", {"metadata": {"name": "bad"}, "spec": 7})
    informer = Informer(client, watch_timeouts=HASTE)
    informer.cache(Widget)
    running = asyncio.create_task(informer.run())
    await until(lambda: api.open_watches == 1)
    found = gauges(client.metrics)
    assert (found["objects"], found["unreadable_objects"], found["lists_total"]) == (2, 1, 1)
    assert 0 <= time.time() - found["last_sync_timestamp_seconds"] < 60
    assert 0 < found["watch_age_seconds"] < 60
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(gauges(client.metrics)) <= {"lists_total", "lists_created"}


async def test_an_object_that_stays_unreadable_for_the_same_reason_is_logged_once(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("widgets", {"metadata": {"name": "bad"}, "spec": 7})
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        api.put("widgets", {"metadata": {"name": "bad", "labels": {"a": "b"}}, "spec": 7})
        api.put("widgets", widget("good"))
        await until(lambda: len(cache) == 1)
    assert caplog.text.count("Widget bad: cannot be decoded") == 1
