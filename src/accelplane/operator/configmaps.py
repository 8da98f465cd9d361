"""The ConfigMaps that custom resources name: each watched by its name, for as long as it is named, and no other."""

import asyncio
from collections.abc import Callable, Iterable

from accelplane.apiserver import Unreachable
from accelplane.kube.cache import Cache
from accelplane.kube.client import Client, Selection
from accelplane.kube.informer import Informer, WatchTimeouts
from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.objects import Request
from accelplane.operator.daemonsets import provisioning_hash
from accelplane.operator.resources import ConfigMap


class ConfigMaps:
    """Hashes of the ConfigMaps of one namespace. `changed(name)` is told of each that came, changed or went."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        changed: Callable[[str], None],
        *,
        watch_timeouts: WatchTimeouts,
        wait: float,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._changed = changed
        self._watch_timeouts = watch_timeouts
        self._wait = wait
        self._caches: dict[str, tuple[Cache[ConfigMap], asyncio.Task[None]]] = {}
        self._named: dict[str, set[str]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._begun = asyncio.Event()
        self._waited_for: set[str] = set()

    async def run(self) -> None:
        """Watches what is asked for until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._begun.set()
            await asyncio.Event().wait()

    async def hash(self, name: str) -> str | None:
        """The hash of a ConfigMap's content; None when there is no such ConfigMap.

        Raises `Unreachable` when nothing is known of it after a while, for which it is waited once.
        """
        await self._begun.wait()
        if not is_dns_subdomain(name):
            return None
        cache = self._cache(name)
        try:
            async with asyncio.timeout(0 if name in self._waited_for else self._wait):
                await cache.synced.wait()
        except TimeoutError:
            self._waited_for.add(name)
            raise Unreachable(f"LIST configmaps {name}", f"nothing known after {self._wait:g} s") from None
        found = cache.get(Request(name, self._namespace))
        return None if found is None else provisioning_hash(found.data or {}, found.binaryData)

    def only_of(self, family: str, names: Iterable[str]) -> None:
        """Says which ConfigMaps the resources of a family name; what none names any more is not watched any more."""
        self._named[family] = set(names)
        for name in self._caches.keys() - set[str]().union(*self._named.values()):
            self._caches.pop(name)[1].cancel()
            self._waited_for.discard(name)

    def _cache(self, name: str) -> Cache[ConfigMap]:
        if name not in self._caches:
            if self._tasks is None:
                raise RuntimeError("ConfigMaps are asked for before they are watched")
            selection = Selection(self._namespace, fields=f"metadata.name={name}")
            informer = Informer(self._client, selection, watch_timeouts=self._watch_timeouts)
            cache = informer.cache(ConfigMap)
            cache.subscribe(lambda _old, _new: self._changed(name), on_unreadable=lambda _request: self._changed(name))
            self._caches[name] = (cache, self._tasks.create_task(informer.run(), name=f"cache {cache}"))
        return self._caches[name][0]
