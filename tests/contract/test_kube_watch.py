"""Watches of caches: interruptions, errors and recovery."""

import asyncio

import pytest
from kubeapi import KubeApi
from kubekinds import widget
from waiting import until
from widgetcaches import names, wait_synced, widgets

from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.objects import Request


@pytest.mark.parametrize("compacted", [False, True])
async def test_subscribers_get_the_changes_of_an_outage(api: KubeApi, compacted: bool) -> None:
    for name in ("stays", "goes", "changes"):
        api.put("widgets", widget(name))
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        events: list[str] = []
        cache.subscribe(lambda old, new: events.append(f"{old and old.spec.size}->{new and new.spec.size}"))
        del events[:]
        await api.stop()
        api.remove("widgets", "goes")
        api.put("widgets", widget("changes", size=9))
        api.put("widgets", widget("new"))
        if compacted:
            api.compact()
        await api.start()
        await until(lambda: names(cache) == ["changes", "new", "stays"])
        assert sorted(events) == ["0->9", "0->None", "None->0"]
        # a watch is resumed while the server has its resource version
        assert api.count("GET /apis/example.com/v1/widgets") == (2 if compacted else 1)


async def test_a_broken_watch_is_resumed(api: KubeApi) -> None:
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        for number in range(5):
            api.abort_watches()
            api.put("widgets", widget(f"w{number}"))
            await until(lambda expected=number + 1: len(cache) == expected)
            await until(lambda: api.open_watches >= 1)
        assert api.count("GET /apis") == 1


async def test_an_idle_watch_is_replaced(api: KubeApi) -> None:
    async with widgets(api, watch_timeouts=WatchTimeouts(idle=0.2, first_delay=0.01, max_delay=0.1)) as cache:
        await wait_synced(cache, api)
        api.silent = True
        api.put("widgets", widget("missed"))
        await until(lambda: api.count("WATCH") > 1)
        api.silent = False
        api.compact()
        await until(lambda: names(cache) == ["missed"])


async def test_bookmarks_avoid_lists_after_compaction(api: KubeApi) -> None:
    api.bookmark_interval = 0.02
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        for number in range(20):
            api.put("configmaps", {"metadata": {"name": f"c{number}", "namespace": "n"}})
        marked = asyncio.get_running_loop().time() + 0.2
        await until(lambda: asyncio.get_running_loop().time() > marked)
        api.compact()
        api.abort_watches()
        await until(lambda: api.count("WATCH") > 1)
        api.put("widgets", widget("w"))
        await until(lambda: len(cache) == 1)
        assert api.count("GET /apis") == 1


async def test_junk_in_a_watch_causes_a_list(api: KubeApi) -> None:
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        for junk in (
            *(b"junk", b'{"type": "ADDED", "object": 5}', b'{"type": "DELETED", "object": {"metadata": {}}}'),
            b'{"type": "ERROR", "object": "?"}',
        ):
            listed, watched = api.count("GET /apis"), api.count("WATCH")
            api.send(junk)
            await until(lambda before=watched: api.count("WATCH") > before)
            assert api.count("GET /apis") > listed
        api.put("widgets", widget("w"))
        await until(lambda: len(cache) == 1)


async def test_watches_that_end_immediately_are_delayed(api: KubeApi) -> None:
    api.fault("WATCH", 200, body=b"", times=1_000_000)
    async with widgets(api, watch_timeouts=WatchTimeouts(first_delay=0.1, max_delay=10)) as cache:
        await cache.synced.wait()
        await until(lambda: api.count("WATCH") >= 3)
        await asyncio.sleep(0.2)
        assert api.count("WATCH") < 8


@pytest.mark.parametrize("status", [429, 500, 410, 403, 0])
async def test_a_cache_recovers_from_error_responses(api: KubeApi, status: int) -> None:
    api.put("widgets", widget("w"))
    api.fault("GET", status, times=3)
    api.fault("WATCH", status, times=3)
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        api.put("widgets", widget("v"))
        await until(lambda: names(cache) == ["v", "w"])


async def test_an_outage_is_logged_once(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        for times in (1, 2):
            fault = api.fault("WATCH", 503, times=1_000_000)
            listing = api.fault("GET", 503, times=1_000_000)
            api.abort_watches()
            before = api.count("GET")
            await until(lambda before=before: api.count("GET") > before + 5)
            api.faults.remove(fault)
            api.faults.remove(listing)
            api.put("widgets", widget(f"new-{times}"))
            await until(lambda times=times: Request(f"new-{times}") in cache.requests() and api.open_watches == 1)
            api.put("widgets", widget(f"newer-{times}"))
            await until(lambda times=times: Request(f"newer-{times}") in cache.requests())
            assert sum("503" in each for each in caplog.messages) <= 2 * times


async def test_a_rate_limited_watch_is_resumed_without_a_list(api: KubeApi) -> None:
    async with widgets(api) as cache:
        await wait_synced(cache, api)
        api.fault("WATCH", 429, times=2)
        api.abort_watches()
        api.put("widgets", widget("w"))
        await until(lambda: len(cache) == 1)
        assert api.count("GET /apis") == 1


async def test_watch_that_ends_soon_after_an_event_is_resumed_without_delay(api: KubeApi) -> None:
    slow = WatchTimeouts(idle=60, duration=60, first_delay=60, max_delay=60)
    async with widgets(api, watch_timeouts=slow) as cache:
        await wait_synced(cache, api)
        for number in range(3):
            api.put("widgets", widget(f"w{number}"))
            await until(lambda count=number + 1: len(cache) == count)
            api.end_watches()
            await until(lambda count=number + 2: api.count("WATCH") == count, 30)


async def test_a_failed_list_is_repeated_after_a_delay(api: KubeApi) -> None:
    api.fault("GET .*/widgets", 500, times=1)
    slow = WatchTimeouts(idle=60, duration=60, first_delay=60, max_delay=60)
    async with widgets(api, watch_timeouts=slow):
        await until(lambda: api.count("GET .*/widgets") == 1)
        await asyncio.sleep(0.1)
        assert api.count("GET .*/widgets") == 1
