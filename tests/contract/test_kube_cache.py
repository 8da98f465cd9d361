"""Caches against a server whose watches end, break, fall silent, tell junk, and forget."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget, widget
from waiting import until

from accelplane.apiserver import StatusError
from accelplane.kube.cache import Cache, UnreadableObject
from accelplane.kube.client import Client, Selection
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.objects import Request

ALL = Selection()
HASTE = WatchTimeouts(idle=5, duration=60, first_delay=0.01, max_delay=0.1)


@contextlib.asynccontextmanager
async def widgets(
    api: KubeApi, selection: Selection = ALL, watch_timeouts: WatchTimeouts = HASTE
) -> AsyncIterator[Cache[Widget]]:
    client = Client(api.config, field_manager="test", timeout=1)
    informer = Informer(client, selection, watch_timeouts=watch_timeouts)
    cache = informer.cache(Widget)
    running = asyncio.create_task(informer.run())
    try:
        yield cache
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await client.close()


def names(cache: Cache[Widget]) -> list[str]:
    return sorted(thing.metadata.name or "" for thing in cache)


async def synced(cache: Cache[Widget], api: KubeApi) -> None:
    async with asyncio.timeout(5):
        await cache.synced.wait()
    await until(lambda: api.watches == 1)


async def test_a_cache_holds_what_there_is_and_follows_it(api: KubeApi) -> None:
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await synced(cache, api)
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


async def test_a_cache_that_may_not_list_begins_when_it_may_and_says_so_once(api: KubeApi, client: Client) -> None:
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
    await synced(cache, api)
    assert names(cache) == ["a"]
    running.cancel()


async def test_subscribers_hear_of_each_change_once_with_what_was_before(api: KubeApi) -> None:
    heard: list[tuple[int | None, int | None]] = []

    def listen(old: Widget | None, new: Widget | None) -> None:
        heard.append((old.spec.size if old else None, new.spec.size if new else None))

    api.put("widgets", widget("a", size=1))
    async with widgets(api) as cache:
        cache.subscribe(listen)
        await synced(cache, api)
        api.put("widgets", widget("a", size=2))
        api.remove("widgets", "a")
        await until(lambda: len(heard) == 3)
        assert heard == [(None, 1), (1, 2), (2, None)]


async def test_who_subscribes_later_hears_of_what_there_is(api: KubeApi) -> None:
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await synced(cache, api)
        heard: list[Widget | None] = []
        cache.subscribe(lambda old, new: heard.append(new))
        assert heard == list(cache)


@pytest.mark.parametrize("compacted", [False, True])
async def test_what_happened_while_the_server_was_away_is_told(api: KubeApi, compacted: bool) -> None:
    for name in ("stays", "goes", "changes"):
        api.put("widgets", widget(name))
    async with widgets(api) as cache:
        await synced(cache, api)
        heard: list[str] = []
        cache.subscribe(lambda old, new: heard.append(f"{old and old.spec.size}->{new and new.spec.size}"))
        del heard[:]
        await api.stop()
        api.remove("widgets", "goes")
        api.put("widgets", widget("changes", size=9))
        api.put("widgets", widget("new"))
        if compacted:
            api.compact()
        await api.start()
        await until(lambda: names(cache) == ["changes", "new", "stays"])
        assert sorted(heard) == ["0->9", "0->None", "None->0"]
        # a watch is taken up where it was, as long as the server remembers
        assert api.count("GET /apis/example.com/v1/widgets") == (2 if compacted else 1)


async def test_a_watch_that_breaks_is_taken_up(api: KubeApi) -> None:
    async with widgets(api) as cache:
        await synced(cache, api)
        for number in range(5):
            api.kill_watches()
            api.put("widgets", widget(f"w{number}"))
            await until(lambda expected=number + 1: len(cache) == expected)
            await until(lambda: api.watches >= 1)
        assert api.count("GET /apis") == 1


async def test_a_watch_that_fell_silent_is_left_for_another(api: KubeApi) -> None:
    async with widgets(api, watch_timeouts=WatchTimeouts(idle=0.2, first_delay=0.01, max_delay=0.1)) as cache:
        await synced(cache, api)
        api.silent = True
        api.put("widgets", widget("missed"))
        await until(lambda: api.count("WATCH") > 1)
        api.silent = False
        api.compact()
        await until(lambda: names(cache) == ["missed"])


async def test_bookmarks_save_lists_when_the_server_forgets(api: KubeApi) -> None:
    api.bookmarks_every = 0.02
    async with widgets(api) as cache:
        await synced(cache, api)
        for number in range(20):
            api.put("configmaps", {"metadata": {"name": f"c{number}", "namespace": "n"}})
        marked = asyncio.get_running_loop().time() + 0.2
        await until(lambda: asyncio.get_running_loop().time() > marked)
        api.compact()
        api.kill_watches()
        await until(lambda: api.count("WATCH") > 1)
        api.put("widgets", widget("w"))
        await until(lambda: len(cache) == 1)
        assert api.count("GET /apis") == 1


async def test_junk_from_a_watch_has_everything_listed_again(api: KubeApi) -> None:
    async with widgets(api) as cache:
        await synced(cache, api)
        for junk in (
            *(b"junk", b'{"type": "ADDED", "object": 5}', b'{"type": "DELETED", "object": {"metadata": {}}}'),
            b'{"type": "ERROR", "object": "?"}',
        ):
            listed, watched = api.count("GET /apis"), api.count("WATCH")
            api.say(junk)
            await until(lambda before=watched: api.count("WATCH") > before)
            assert api.count("GET /apis") > listed
        api.put("widgets", widget("w"))
        await until(lambda: len(cache) == 1)


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_circle(api: KubeApi) -> None:
    api.fault("WATCH", 200, body=b"", times=1_000_000)
    async with widgets(api, watch_timeouts=WatchTimeouts(first_delay=0.1, max_delay=10)) as cache:
        await cache.synced.wait()
        await until(lambda: api.count("WATCH") >= 3)
        await asyncio.sleep(0.2)
        assert api.count("WATCH") < 8


@pytest.mark.parametrize("status", [429, 500, 410, 403, 0])
async def test_a_cache_outlasts_a_server_that_refuses(api: KubeApi, status: int) -> None:
    api.put("widgets", widget("w"))
    api.fault("GET", status, times=3)
    api.fault("WATCH", status, times=3)
    async with widgets(api) as cache:
        await synced(cache, api)
        api.put("widgets", widget("v"))
        await until(lambda: names(cache) == ["v", "w"])


async def test_a_server_that_is_away_is_told_of_once_and_again_when_it_has_been_back(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    api.put("widgets", widget("a"))
    async with widgets(api) as cache:
        await synced(cache, api)
        for times in (1, 2):
            fault = api.fault("WATCH", 503, times=1_000_000)
            listing = api.fault("GET", 503, times=1_000_000)
            api.kill_watches()
            before = api.count("GET")
            await until(lambda before=before: api.count("GET") > before + 5)
            api.faults.remove(fault)
            api.faults.remove(listing)
            api.put("widgets", widget(f"new-{times}"))
            await until(lambda times=times: Request(f"new-{times}") in cache.requests() and api.watches == 1)
            api.put("widgets", widget(f"newer-{times}"))
            await until(lambda times=times: Request(f"newer-{times}") in cache.requests())
            assert sum("503" in each for each in caplog.messages) <= 2 * times


async def test_a_cache_holds_its_selection_only(api: KubeApi) -> None:
    api.put("widgets", widget("a", color="red"))
    api.put("widgets", widget("b", color="blue"))
    async with widgets(api, Selection(labels="color=red")) as cache:
        await synced(cache, api)
        assert names(cache) == ["a"]
        api.put("widgets", widget("b", color="red"))
        api.put("widgets", widget("a", color="blue"))
        await until(lambda: names(cache) == ["b"])


async def test_indexes_find_objects_by_what_they_are_now(api: KubeApi) -> None:
    api.put("widgets", widget("a", size=1))
    async with widgets(api) as cache:
        cache.add_index("size", lambda thing: [str(thing.spec.size)])
        await synced(cache, api)
        api.put("widgets", widget("b", size=1))
        await until(lambda: [one.metadata.name for one in cache.by_index("size", "1")] == ["a", "b"])
        api.put("widgets", widget("a", size=2))
        await until(lambda: [one.metadata.name for one in cache.by_index("size", "2")] == ["a"])
        api.remove("widgets", "b")
        await until(lambda: not cache.by_index("size", "1"))
        cache.add_index("name", lambda thing: [thing.metadata.name or ""])
        assert cache.by_index("name", "a") == list(cache)


async def test_an_object_that_cannot_be_read_is_not_taken_for_absent(api: KubeApi) -> None:
    api.put("widgets", {"metadata": {"name": "bad"}, "spec": {"size": "large"}})
    api.put("widgets", widget("turns"))
    async with widgets(api) as cache:
        await synced(cache, api)
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


async def test_what_nobody_reads_is_not_kept(api: KubeApi) -> None:
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
