"""Caches: the objects of one selection, kept up to date by list and watch, to be read without asking the server.

A cache is behind the server by what is on its way, and never wrong for longer than the server is away: a watch that
ends is taken up where it was, one whose version is too old lists again, a silent one is taken for dead. Who
subscribes is told of every object that came, changed or went, also of what happened while nobody watched.

What is cached is shared: readers must not change it.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Generic, TypeVar

import msgspec

from accelplane.apiserver import ApiError, DecodeError, Gone, StatusError, WatchIdleTimeout

from .client import Client, Selection, Watched
from .objects import Metadata, Object, Request, api_of, request_of, trim

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)
Subscriber = Callable[[T | None, T | None], None]


class UnreadableObject(Exception):
    """The object exists, but is not what its type says: to take it for absent would be wrong."""


class WatchTimeouts(msgspec.Struct, frozen=True):
    """How long a cache waits: for a watch's next sign of life, for its end, and before it tries again."""

    idle: float = 180.0
    duration: float = 300.0
    first_delay: float = 0.8
    max_delay: float = 5.0


class Cache(Generic[T]):
    """The objects of one kind and selection. `run` keeps it; it is of use once `synced` is set.

    `transform` may take from each object what nobody reads, before it is stored.
    """

    def __init__(
        self,
        client: Client,
        kind: type[T],
        selection: Selection = Selection(),  # noqa: B008 a frozen value
        *,
        transform: Callable[[T], None] = trim,
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 a frozen value
    ) -> None:
        self.kind = kind
        self.selection = selection
        self.synced = asyncio.Event()
        self._client = client
        self._transform = transform
        self._watch_timeouts = watch_timeouts
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[Request, T] = {}
        self._unreadable: dict[Request, str] = {}
        self._indexes: dict[str, tuple[Callable[[T], Iterable[str]], dict[str, dict[Request, None]]]] = {}
        self._subscribers: list[Subscriber[T]] = []
        self._version = ""
        self._failures = 0
        self._trouble = ""

    def __str__(self) -> str:
        where = [part for part in (self.selection.namespace, self.selection.labels, self.selection.fields) if part]
        return " ".join((api_of(self.kind).plural, *where))

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects.values()))

    def get(self, request: Request) -> T | None:
        """The object as last seen. Raises `UnreadableObject`."""
        if why := self._unreadable.get(request):
            raise UnreadableObject(f"{api_of(self.kind).resource.kind} {request}: {why}")
        return self._objects.get(request)

    def requests(self) -> list[Request]:
        """The keys of all objects, of unreadable ones too."""
        return [*self._objects, *(key for key in self._unreadable if key not in self._objects)]

    def add_index(self, name: str, values: Callable[[T], Iterable[str]]) -> None:
        """Makes objects findable by what `values` says of them; the same name again replaces the index."""
        entries: dict[str, dict[Request, None]] = {}
        self._indexes[name] = (values, entries)
        for key, thing in self._objects.items():
            _enter(entries, values(thing), key)

    def by_index(self, name: str, value: str) -> list[T]:
        """The objects of which an index says `value`, in the order in which they came."""
        return [self._objects[key] for key in self._indexes[name][1].get(value, ())]

    def subscribe(self, subscriber: Subscriber[T]) -> None:
        """Has `subscriber(old, new)` called for each change from now on, and now for each object that there is."""
        self._subscribers.append(subscriber)
        for thing in self:
            subscriber(None, thing)

    async def run(self) -> None:
        """Keeps the cache up to date until cancelled."""
        while True:
            started = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                heard = await self._watch()
                if not heard and time.monotonic() - started < 1:
                    # a server that ends watches as soon as they begin must not be asked in a circle
                    await self._pause(0.0)
            except WatchIdleTimeout as error:
                log.debug("%s: watches again: %s", self, error)
            except ApiError as error:
                self._complain_of(error)
                # when only the connection failed the watch is taken up where it was
                if isinstance(error, StatusError | DecodeError):
                    self._version = ""
                await self._pause(error.retry_after)

    def _complain_of(self, error: ApiError) -> None:
        if isinstance(error, Gone):
            log.info("%s: lists again: %s", self, error)
            return
        # A server that is away is one piece of news, and not one every few seconds from every cache.
        again = str(error) == self._trouble
        log.log(logging.DEBUG if again else logging.WARNING, "%s: %s", self, error)
        self._trouble = str(error)

    async def _pause(self, at_least: float) -> None:
        watch_timeouts = self._watch_timeouts
        delay = min(watch_timeouts.first_delay * 2 ** min(self._failures, 60), watch_timeouts.max_delay)
        self._failures += 1
        await asyncio.sleep(max(at_least, delay * (0.5 + random.random())))  # noqa: S311 no secret

    async def run_when_permitted(self, on_forbidden: Callable[[StatusError], None], *, retry: float) -> None:
        """The same from when the account may list: roles are not there, or are changed, without a word to it.

        Calls `on_forbidden` once. Retries every `retry` seconds.
        """
        told = False
        while (error := await self._refusal()) is not None:
            if not told:
                on_forbidden(error)
                told = True
            await asyncio.sleep(retry)
        await self.run()

    async def _refusal(self) -> StatusError | None:
        # An account whose rights are limited to one name must ask for this name.
        fields = self.selection.fields or "metadata.name=none"
        selection = msgspec.structs.replace(self.selection, fields=fields)
        try:
            await self._client.list(self.kind, selection)
        except StatusError as error:
            return error if error.code == HTTPStatus.FORBIDDEN else None
        except ApiError as error:
            log.debug("%s", error)
        return None

    async def _list(self) -> None:
        listing = await self._client.list(self.kind, self.selection)
        seen: set[Request] = set()
        unreadable: dict[Request, str] = {}
        for raw, why in listing.unreadable:
            try:
                key = _key(msgspec.json.decode(raw, type=_Envelope))
            except msgspec.MsgspecError:
                key = None
            if key is None:
                raise DecodeError(f"LIST {self}", f"an item that is no object: {why}")
            unreadable[key] = why
            self._complain(key, why)
        for thing in listing.items:
            try:
                key = request_of(thing)
            except ValueError as error:
                raise DecodeError(f"LIST {self}", str(error)) from error
            seen.add(key)
            self._transform(thing)
            self._store(key, thing)
        for key in [key for key in self._objects if key not in seen and key not in unreadable]:
            self._drop(key)
        self._unreadable = unreadable
        self._version = listing.resource_version
        self.synced.set()

    async def _watch(self) -> bool:
        """Follows one watch to its end; whether it told anything."""
        heard = False
        watch_timeouts = self._watch_timeouts
        watch = self._client.watch(
            self.kind, self.selection, self._version, lasting=watch_timeouts.duration, silence=watch_timeouts.idle
        )
        try:
            async for event in watch:
                heard = True
                self._failures, self._trouble = 0, ""
                self._see(event)
        finally:
            await watch.aclose()
        return heard

    def _see(self, event: Watched) -> None:
        try:
            envelope = msgspec.json.decode(event.object, type=_Envelope)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"WATCH {self}", f"what was {event.type} is no object: {error}") from error
        if event.type != "BOOKMARK":
            key = _key(envelope)
            if key is None:
                raise DecodeError(f"WATCH {self}", f"what was {event.type} has no name")
            if event.type == "DELETED":
                self._unreadable.pop(key, None)
                self._drop(key)
            else:
                try:
                    thing = self._decoder.decode(event.object)
                except msgspec.MsgspecError as error:
                    self._unreadable[key] = str(error)
                    self._complain(key, str(error))
                else:
                    self._transform(thing)
                    self._unreadable.pop(key, None)
                    self._store(key, thing)
        self._version = envelope.metadata.resourceVersion or self._version

    def _complain(self, key: Request, why: str) -> None:
        kind = api_of(self.kind).resource.kind
        log.warning("%s %s: cannot be read, so nothing is done about it: %s", kind, key, why)

    def _store(self, key: Request, thing: T) -> None:
        old = self._objects.get(key)
        if old is not None and _version(old) == _version(thing) and _version(thing):
            return
        self._objects[key] = thing
        self._tell(key, old, thing)

    def _drop(self, key: Request) -> None:
        if (old := self._objects.pop(key, None)) is not None:
            self._tell(key, old, None)

    def _tell(self, key: Request, old: T | None, new: T | None) -> None:
        for values, entries in self._indexes.values():
            before = list(values(old)) if old is not None else []
            after = list(values(new)) if new is not None else []
            for value in before:
                if value not in after and value in entries:
                    entries[value].pop(key, None)
                    if not entries[value]:
                        del entries[value]
            _enter(entries, after, key)
        for subscriber in self._subscribers:
            subscriber(old, new)


class _Envelope(msgspec.Struct, frozen=True):
    metadata: Metadata = msgspec.field(default_factory=Metadata)


def _enter(entries: dict[str, dict[Request, None]], values: Iterable[str], key: Request) -> None:
    for value in values:
        entries.setdefault(value, {})[key] = None


def _version(thing: Object) -> str | None:
    return thing.metadata.resourceVersion if thing.metadata else None


def _key(envelope: _Envelope) -> Request | None:
    return Request(envelope.metadata.name, envelope.metadata.namespace or "") if envelope.metadata.name else None
