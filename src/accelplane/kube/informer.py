"""Informers: one list and watch of a resource and selection, which feeds any number of caches.

Two callers that read different fields of the same objects share one watch: each has a `Cache` with its own type,
`transform`, indexes and subscribers. Each object is decoded once per cache, and the undecoded object is dropped.

A watch that ends is resumed at the last resource version. If the server no longer has that version, everything is
listed again and compared: subscribers are notified of all changes. A watch that is idle too long is closed and
resumed.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from http import HTTPStatus
from typing import Protocol, TypeVar

import msgspec

from accelplane.apiserver.errors import (
    ApiError,
    DecodeError,
    Gone,
    StatusError,
    TooManyRequests,
    WatchIdleTimeout,
)

from .cache import DECODE_ERRORS, Cache, Envelope, NotAnObject, resource_name
from .client import Selection, Watched, path_of
from .metrics import Metrics
from .objects import Object, Request, api_of, metadata_only, trim

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)

# A watch that ends sooner was not worth its request.
_SHORTEST_WATCH = 1.0
# The account has no right, or the resource is not installed.
_UNSERVED = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class WatchTimeouts(msgspec.Struct, frozen=True):
    """Timeouts in seconds: until an idle watch is closed, until a watch ends, and delays before a retry."""

    idle: float = 180.0
    duration: float = 300.0
    first_delay: float = 0.8
    max_delay: float = 5.0


class ListerWatcher(Protocol):
    """The part of `Client` that an informer uses."""

    @property
    def metrics(self) -> Metrics: ...

    async def list_pages(
        self, kind: type[Object], selection: Selection, consume: Callable[[Sequence[msgspec.Raw]], None]
    ) -> str: ...

    def watch(
        self, kind: type[Object], selection: Selection, resource_version: str, *, duration: float, idle: float
    ) -> AsyncGenerator[Watched, None]: ...


class Informer:
    """Keeps its caches current while `run` runs. Caches must be added before."""

    def __init__(
        self,
        client: ListerWatcher,
        selection: Selection = Selection(),  # noqa: B008 - a frozen value
        *,
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 - a frozen value
    ) -> None:
        self.selection = selection
        self.synced = asyncio.Event()
        # Set after the first list, and when it is certain that there is none: no right, or no such resource.
        self.initialized = asyncio.Event()
        self.synced_at = 0.0
        self.watching_since = 0.0
        self._client = client
        self._timeouts = watch_timeouts
        self._caches: list[Cache[Object]] = []
        self._running = False
        self._version = ""
        self._failures = 0
        self._reported = ""

    def __str__(self) -> str:
        return resource_name(self._kind, self.selection)

    @property
    def resource(self) -> str:
        """The name of the resource, such as `pods` or `daemonsets.apps`."""
        info = api_of(self._kind)
        return f"{info.plural}.{info.resource.group}".rstrip(".")

    @property
    def selector(self) -> str:
        """The selection: namespace, label selector and field selector."""
        return " ".join(part for part in msgspec.structs.astuple(self.selection) if part)

    @property
    def objects(self) -> int:
        """The number of objects, including unreadable ones."""
        return max(len(cache) + len(cache.unreadable) for cache in self._caches)

    @property
    def unreadable(self) -> int:
        """The number of objects that do not fit the type of a cache."""
        return len({request for cache in self._caches for request in cache.unreadable})

    def cache(self, kind: type[T], *, transform: Callable[[T], None] = trim) -> Cache[T]:
        """Adds a cache. `transform` removes unneeded fields of each object before it is stored.

        All caches of an informer are of the same resource. Raises `RuntimeError` while `run` runs: the new cache would
        miss the objects that were listed before.
        """
        if self._running:
            raise RuntimeError(f"{self}: cannot add a cache to a running informer")
        if self._caches and path_of(kind) != path_of(self._kind):
            raise ValueError(f"{self}: expected another type of this resource, found {path_of(kind)}")
        cache = Cache(kind, self.selection, self.synced, transform=transform)
        self._caches.append(cache)  # pyright: ignore[reportArgumentType] - the informer stores and removes by key only
        return cache

    async def run(self) -> None:
        """Lists and watches until cancelled."""
        await self._run(frozenset())

    async def _run(self, final: Collection[int], *, until_synced: bool = False) -> None:
        """Raises `StatusError` for a status of `final`; other errors are retried.

        With `until_synced`, the statuses of `final` are retried too, after the first complete list.
        """
        if not self._caches:
            raise RuntimeError("informer without a cache: add one with `cache` before `run`")
        if self._running:
            raise RuntimeError(f"{self}: already running")
        self._running = True
        self._client.metrics.informers.add(self)
        try:
            while True:
                await self._run_once(() if until_synced and self.synced.is_set() else final)
        finally:
            self._running = False
            self._client.metrics.informers.discard(self)

    async def run_when_permitted(self, on_forbidden: Callable[[StatusError], None], *, retry: float) -> None:
        """Runs as soon as the account may list. Roles are created and changed without notification, so it is tried.

        Calls `on_forbidden` after the first rejection. Retries every `retry` seconds.
        """
        await self._run_when_accepted(HTTPStatus.FORBIDDEN, on_forbidden, retry)

    async def run_when_served(self, on_missing: Callable[[StatusError], None], *, retry: float) -> None:
        """Runs as soon as the server has the resource, whose definition may be created at any time.

        Calls `on_missing` after the first status 404. Retries every `retry` seconds.
        """
        await self._run_when_accepted(HTTPStatus.NOT_FOUND, on_missing, retry)

    async def _run_when_accepted(
        self, rejection: HTTPStatus, on_rejected: Callable[[StatusError], None], retry: float
    ) -> None:
        """After the first complete list, a rejection is an error like others, and the caches stay as they are."""
        reported = False
        while True:
            try:
                await self._run((rejection,), until_synced=True)
            except StatusError as error:
                if not reported:
                    on_rejected(error)
                self.initialized.set()
                reported = True
            await asyncio.sleep(retry)

    async def run_while_served(self, on_rejected: Callable[[StatusError], None], *, retry: float) -> None:
        """Runs while the server has the resource and the account may list and watch it. Until then caches are empty.

        Calls `on_rejected` after each status 403 or 404, and retries after `retry` seconds.
        """
        while True:
            try:
                await self._run(_UNSERVED)
            except StatusError as error:
                self._version = ""
                for cache in self._caches:
                    cache.retain(set())
                self.initialized.set()
                on_rejected(error)
            await asyncio.sleep(retry)

    @property
    def _kind(self) -> type[Object]:
        """The kind to request: the server sends metadata only if no cache reads more."""
        kinds = [cache.kind for cache in self._caches]
        return next((kind for kind in kinds if not metadata_only(kind)), kinds[0])

    async def _run_once(self, final: Collection[int]) -> None:
        started = time.monotonic()
        try:
            if not self._version:
                await self._list()
            received = await self._watch()
            if not received and time.monotonic() - started < _SHORTEST_WATCH:
                await self._delay(0.0)
        except WatchIdleTimeout as error:
            log.debug("%s: watching again: %s", self, error)
        except ApiError as error:
            if isinstance(error, StatusError) and error.code in final:
                raise
            self._report(error)
            # After a network error or a rate limit the watch is resumed at its last version.
            if isinstance(error, StatusError | DecodeError) and not isinstance(error, TooManyRequests):
                self._version = ""
            await self._delay(error.retry_after)

    async def _list(self) -> None:
        keys: set[Request] = set()

        def store(page: Sequence[msgspec.Raw]) -> None:
            for raw in page:
                for cache in self._caches:
                    try:
                        keys.add(cache.store(raw))
                    except NotAnObject as error:
                        raise DecodeError(f"LIST {self}", f"an item is not an object: {error}") from error

        self._client.metrics.cache_lists.labels(self.resource, self.selector).inc()
        version = await self._client.list_pages(self._kind, self.selection, store)
        for cache in self._caches:
            cache.retain(keys)
        self._version = version
        self.synced_at = time.time()
        self.synced.set()
        self.initialized.set()

    async def _watch(self) -> bool:
        """Reads one watch to its end. Returns whether there was any event."""
        received = False
        timeouts = self._timeouts
        watch = self._client.watch(
            self._kind, self.selection, self._version, duration=timeouts.duration, idle=timeouts.idle
        )
        self.watching_since = time.time()
        try:
            async for event in watch:
                received = True
                self._failures, self._reported = 0, ""
                self._handle(event)
        finally:
            self.watching_since = 0.0
            await watch.aclose()
        return received

    def _handle(self, event: Watched) -> None:
        """Raises `DecodeError` if the event has no object with a name."""
        try:
            metadata = msgspec.json.decode(event.object, type=Envelope).metadata
        except DECODE_ERRORS as error:
            raise DecodeError(f"WATCH {self}", f"{event.type} without an object: {error}") from error
        if event.type != "BOOKMARK":
            if not metadata.name:
                raise DecodeError(f"WATCH {self}", f"{event.type} without metadata.name")
            for cache in self._caches:
                if event.type == "DELETED":
                    cache.remove(Request(metadata.name, metadata.namespace or ""))
                else:
                    cache.store(event.object)
        self._version = metadata.resource_version or self._version

    def _report(self, error: ApiError) -> None:
        """Logs an error. The same error of every retry is logged once."""
        if isinstance(error, Gone):
            log.info("%s: listing again: %s", self, error)
            return
        log.log(logging.DEBUG if str(error) == self._reported else logging.WARNING, "%s: %s", self, error)
        self._reported = str(error)

    async def _delay(self, at_least: float) -> None:
        timeouts = self._timeouts
        delay = min(timeouts.first_delay * 2 ** min(self._failures, 60), timeouts.max_delay)
        self._failures += 1
        await asyncio.sleep(max(at_least, delay * (0.5 + random.random())))  # noqa: S311 - not a secret
