"""A cache of widgets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubeapi import KubeApi
from kubekinds import Widget
from waiting import until

from accelplane.kube.cache import Cache
from accelplane.kube.client import Client, Selection
from accelplane.kube.informer import Informer, WatchTimeouts

ALL = Selection()
HASTE = WatchTimeouts(idle=5, duration=60, first_delay=0.01, max_delay=0.1)


@asynccontextmanager
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


async def wait_synced(cache: Cache[Widget], api: KubeApi) -> None:
    async with asyncio.timeout(5):
        await cache.synced.wait()
    await until(lambda: api.open_watches == 1)
