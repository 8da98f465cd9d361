"""Caches of single objects, each watched by its name while it is used.

For objects that other objects name: a cache of all objects of their kind would need more memory and more rights.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from accelplane.apiserver import Unreachable

from .cache import Cache
from .client import Client, Selection
from .informer import Informer, WatchTimeouts
from .objects import Object, Request, api_of

T = TypeVar("T", bound=Object)


class NamedCaches(Generic[T]):
    """Objects of one kind and namespace by name.

    `on_change(name, old, new)` is called when an object is seen first, changes, or is deleted; `old` and `new` are None
    for an object that does not exist or is unreadable.
    """

    def __init__(
        self,
        client: Client,
        kind: type[T],
        namespace: str,
        on_change: Callable[[str, T | None, T | None], None],
        *,
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 a frozen value
        timeout: float = 10.0,
    ) -> None:
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._on_change = on_change
        self._watch_timeouts = watch_timeouts
        self._timeout = timeout
        self._caches: dict[str, tuple[Cache[T], asyncio.Task[None]]] = {}
        self._used: dict[str, set[str]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._started = asyncio.Event()
        self._timed_out: set[str] = set()

    async def run(self) -> None:
        """Watches the objects that are in use until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._started.set()
            await asyncio.Event().wait()

    async def get(self, name: str) -> T | None:
        """The object as last seen; None if it does not exist. From the first call on it is watched.

        Raises `Unreachable` if nothing is known of it yet. Only the first call waits for that, `timeout` seconds.
        """
        await self._started.wait()
        cache = self._cache(name)
        try:
            async with asyncio.timeout(0 if name in self._timed_out else self._timeout):
                await cache.synced.wait()
        except TimeoutError:
            self._timed_out.add(name)
            raise Unreachable(
                f"LIST {api_of(self._kind).plural} {name}", f"no answer for {self._timeout:g} s"
            ) from None
        return cache.get(Request(name, self._namespace))

    def use(self, user: str, names: Iterable[str]) -> None:
        """Sets the names that a user uses. Objects that no user uses are not watched any more."""
        self._used[user] = set(names)
        if not self._used[user]:
            del self._used[user]
        for name in self._caches.keys() - set[str]().union(*self._used.values()):
            self._caches.pop(name)[1].cancel()
            self._timed_out.discard(name)

    def _cache(self, name: str) -> Cache[T]:
        if name not in self._caches:
            if self._tasks is None:
                raise RuntimeError("NamedCaches: used before run")
            selection = Selection(self._namespace, fields=f"metadata.name={name}")
            informer = Informer(self._client, selection, watch_timeouts=self._watch_timeouts)
            cache = informer.cache(self._kind)
            cache.subscribe(
                lambda old, new: self._on_change(name, old, new),
                on_unreadable=lambda _request: self._on_change(name, None, None),
            )
            self._caches[name] = (cache, self._tasks.create_task(informer.run(), name=f"cache {cache}"))
        return self._caches[name][0]
