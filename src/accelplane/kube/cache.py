"""Caches: typed objects of one resource and selection in memory, kept current by an `Informer`.

A cache lags behind the server by the events that are on their way. Its objects are shared: readers must not change
them.

An object that does not fit the cache's type is *unreadable*. It exists, but none of its fields can be trusted:

- `get` raises `UnreadableObject`, `requests` and `unreadable` include it;
- iteration, `len` and `by_index` omit it, also if an earlier version was readable;
- subscribers are notified that the readable version is gone, and `on_unreadable` is called with its key.

Code that deletes something because no object needs it has to check `unreadable` first.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from .client import Selection
from .objects import Object, Request, api_of, trim

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)
Subscriber = Callable[[T | None, T | None], None]

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class UnreadableObject(Exception):
    """The object exists, but does not fit the type of the cache. It must not be treated as absent."""


class NotAnObject(Exception):
    """Something else than a Kubernetes object with a name."""


class Cache(Generic[T]):
    """The objects of one kind and selection, created by `Informer.cache` or `Manager.cache`.

    `synced` is set after the first complete list; before it, an object that is not in the cache may exist.
    """

    def __init__(
        self, kind: type[T], selection: Selection, synced: asyncio.Event, *, transform: Callable[[T], None] = trim
    ) -> None:
        self.kind = kind
        self.selection = selection
        self.synced = synced
        self._transform = transform
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[Request, T] = {}
        self._unreadable: dict[Request, str] = {}
        self._indexes: dict[str, tuple[Callable[[T], Iterable[str]], dict[str, dict[Request, None]]]] = {}
        self._subscribers: list[Subscriber[T]] = []
        self._unreadable_subscribers: list[Callable[[Request], None]] = []

    def __str__(self) -> str:
        return resource_name(self.kind, self.selection)

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._objects.values()))

    @property
    def unreadable(self) -> Mapping[Request, str]:
        """The unreadable objects, each with the reason."""
        return MappingProxyType(self._unreadable)

    def get(self, request: Request) -> T | None:
        """Returns an object, or None if it does not exist. Raises `UnreadableObject`."""
        if (reason := self._unreadable.get(request)) is not None:
            raise UnreadableObject(f"{api_of(self.kind).resource.kind} {request}: {reason}")
        return self._objects.get(request)

    def requests(self) -> list[Request]:
        """Returns the keys of all objects, including unreadable ones."""
        return [*self._objects, *self._unreadable]

    def add_index(self, name: str, values: Callable[[T], Iterable[str]]) -> None:
        """Adds an index from `values(object)` to objects. An index of the same name is replaced."""
        entries: dict[str, dict[Request, None]] = {}
        self._indexes[name] = (values, entries)
        for request, thing in self._objects.items():
            _add_to_index(entries, values(thing), request)

    def by_index(self, name: str, value: str) -> list[T]:
        """Returns the objects with this value in an index, in the order of their arrival."""
        return [self._objects[request] for request in self._indexes[name][1].get(value, ())]

    def subscribe(self, subscriber: Subscriber[T], *, on_unreadable: Callable[[Request], None] | None = None) -> None:
        """Calls `subscriber(old, new)` for each change from now on, and immediately for each object in the cache.

        `on_unreadable` is called with the key of an object that becomes unreadable, or that was unreadable when it was
        deleted.
        """
        self._subscribers.append(subscriber)
        for thing in self:
            subscriber(None, thing)
        if on_unreadable is not None:
            self._unreadable_subscribers.append(on_unreadable)
            for request in list(self._unreadable):
                on_unreadable(request)

    # Updates by the informer

    def store(self, raw: msgspec.Raw) -> Request:
        """Stores an object and returns its key. Raises `NotAnObject`."""
        try:
            thing = self._decoder.decode(raw)
        except DECODE_ERRORS as error:
            request = key_of(raw)
            self._store_unreadable(request, str(error))
            return request
        if thing.metadata is None or not thing.metadata.name:
            raise NotAnObject("it has no metadata.name")
        request = Request(thing.metadata.name, thing.metadata.namespace or "")
        old = self._objects.get(request)
        if old is not None and _version(old) == _version(thing) and _version(thing):
            return request
        self._transform(thing)
        self._unreadable.pop(request, None)
        self._objects[request] = thing
        self._notify(request, old, thing)
        return request

    def remove(self, request: Request) -> None:
        """Removes an object that was deleted."""
        if self._unreadable.pop(request, None) is not None:
            self._notify_unreadable(request)
        elif (old := self._objects.pop(request, None)) is not None:
            self._notify(request, old, None)

    def retain(self, requests: set[Request]) -> None:
        """Removes all objects except these: the others were deleted while no watch was open."""
        for request in self.requests():
            if request not in requests:
                self.remove(request)

    def _store_unreadable(self, request: Request, reason: str) -> None:
        if self._unreadable.get(request) != reason:
            kind = api_of(self.kind).resource.kind
            log.warning("%s %s: cannot be decoded: %s; it is ignored until it changes", kind, request, reason)
        self._unreadable[request] = reason
        if (old := self._objects.pop(request, None)) is not None:
            self._notify(request, old, None)
        self._notify_unreadable(request)

    def _notify(self, request: Request, old: T | None, new: T | None) -> None:
        for values, entries in self._indexes.values():
            before = list(values(old)) if old is not None else []
            after = list(values(new)) if new is not None else []
            for value in before:
                if value not in after and value in entries:
                    entries[value].pop(request, None)
                    if not entries[value]:
                        del entries[value]
            _add_to_index(entries, after, request)
        for subscriber in self._subscribers:
            subscriber(old, new)

    def _notify_unreadable(self, request: Request) -> None:
        for subscriber in self._unreadable_subscribers:
            subscriber(request)


class _Metadata(msgspec.Struct, frozen=True):
    name: str | None = None
    namespace: str | None = None
    resource_version: str | None = msgspec.field(name="resourceVersion", default=None)


class Envelope(msgspec.Struct, frozen=True):
    """The identity of an object of any type."""

    metadata: _Metadata = _Metadata()


def key_of(raw: msgspec.Raw) -> Request:
    """Returns the key of an undecoded object. Raises `NotAnObject`."""
    try:
        metadata = msgspec.json.decode(raw, type=Envelope).metadata
    except DECODE_ERRORS as error:
        raise NotAnObject(str(error)) from error
    if not metadata.name:
        raise NotAnObject("it has no metadata.name")
    return Request(metadata.name, metadata.namespace or "")


def resource_name(kind: type[Object], selection: Selection) -> str:
    """Returns the plural name of a kind and the parts of the selection, for messages."""
    parts: tuple[str, ...] = msgspec.structs.astuple(selection)
    return " ".join(part for part in (api_of(kind).plural, *parts) if part)


def _add_to_index(entries: dict[str, dict[Request, None]], values: Iterable[str], request: Request) -> None:
    for value in values:
        entries.setdefault(value, {})[request] = None


def _version(thing: Object) -> str | None:
    return thing.metadata.resourceVersion if thing.metadata else None
