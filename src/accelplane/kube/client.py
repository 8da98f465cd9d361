"""Typed requests to the API server: kinds in and out. Raises the errors of `accelplane.apiserver`.

Lists are read in small pages: a process seldom returns memory that it has allocated once.

Facts: Kubernetes API concepts (list chunks, watch bookmarks, PartialObjectMetadata, server-side apply, dry run).
"""

import copy
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from accelplane.apiserver import (
    APPLY_PATCH,
    JSON,
    JSON_PATCH,
    MERGE_PATCH,
    ApiServer,
    ClientConfig,
    NotFound,
    RateLimit,
    WatchEvent,
    load_config,
    resource_path,
)

from .metrics import Metrics
from .objects import Object, api_of, document_of, is_namespaced, metadata_of, metadata_only

__all__ = ["FENCE", "PAGE", "Client", "ClientConfig", "Listing", "Selection", "Watched", "load_config", "path_of"]

PAGE = 100
_IDLE_TIMEOUT = 15.0

# Called before each write of a task and of its child tasks. An exception prevents the write.
FENCE: ContextVar[Callable[[], None]] = ContextVar("fence", default=lambda: None)

T = TypeVar("T", bound=Object)
Propagation = Literal["Background", "Foreground", "Orphan"]
Watched: TypeAlias = WatchEvent[msgspec.Raw]


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """A list as of one resource version; `unreadable` has the items that are not of the type, with the reason."""

    items: Sequence[T]
    unreadable: Sequence[tuple[msgspec.Raw, str]]
    resource_version: str


class Selection(msgspec.Struct, frozen=True):
    """Objects of a kind: of one namespace or of all, by label and field selectors."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""


class Client:
    """The API server, for one program. Ends with `close`.

    `timeout` is the time of a request and its retries, in seconds. Writes have the options `subresource` and `dry_run`;
    with the latter the server validates and returns the object, and stores nothing.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        field_manager: str,
        metrics: Metrics | None = None,
        timeout: float = 15.0,
        rate_limit: RateLimit | None = None,
    ) -> None:
        """Raises `NoCredentials` for an address, certificates or a token that cannot be used."""
        self.field_manager = field_manager
        self.namespace = config.namespace
        self.metrics = metrics or Metrics()
        self._timeout = timeout
        self._server = ApiServer(
            config,
            idle_timeout=_IDLE_TIMEOUT,
            rate_limit=rate_limit,
            before_write=_check_fence,
            on_response=self._count,
        )
        self._server.check()

    @property
    def server(self) -> ApiServer:
        """The API server, for requests without types of resources."""
        return self._server

    async def close(self) -> None:
        self._server.close()

    async def get(self, kind: type[T], name: str, namespace: str = "", *, subresource: str = "") -> T:
        """One object. Raises `NotFound`."""
        path = path_of(kind, namespace, name, subresource)
        return await self._server.get(path, kind, accept=_accept(kind), deadline=self._timeout)

    async def list(
        self,
        kind: type[T],
        selection: Selection = Selection(),  # noqa: B008 a frozen value
        *,
        page: int = PAGE,
    ) -> Listing[T]:
        """Returns all objects of a selection, read in pages. Raises `Gone` if the continue token expired."""
        items: list[T] = []
        unreadable: list[tuple[msgspec.Raw, str]] = []
        decoder = msgspec.json.Decoder(kind)

        def decode(raws: Sequence[msgspec.Raw]) -> None:
            for raw in raws:
                try:
                    items.append(decoder.decode(raw))
                except msgspec.MsgspecError as error:
                    unreadable.append((raw.copy(), str(error)))

        version = await self.list_pages(kind, selection, decode, page=page)
        return Listing(items, unreadable, version)

    async def list_pages(
        self,
        kind: type[Object],
        selection: Selection,
        consume: Callable[[Sequence[msgspec.Raw]], None],
        *,
        page: int = PAGE,
    ) -> str:
        """Calls `consume` with the undecoded objects of each page; returns the resource version of the list.

        An undecoded object is a view of its page, which stays in memory with the view: copy parts that are stored.
        Raises `Gone` if the continue token expired.
        """
        return await self._server.list(
            path_of(kind, selection.namespace),
            consume,
            query=_selectors(selection),
            page=page,
            accept=_accept(kind, "List"),
            deadline=self._timeout,
        )

    async def create(self, new: T, *, subresource: str = "", dry_run: bool = False) -> T:
        """Creates an object, or a subresource of the object that it names. Raises `AlreadyExists`."""
        kind = type(new)
        # The server generates some names, and reviews such as TokenReview have no metadata.
        namespace = (new.metadata.namespace if new.metadata else "") or ""
        subresource = subresource or api_of(kind).action or ""
        name = (metadata_of(new).name or "") if subresource else ""
        path = path_of(kind, namespace, name, subresource)
        return await self._server.post(
            path, document_of(new), kind, query=self._query(dry_run=dry_run), deadline=self._timeout
        )

    async def replace(self, changed: T, *, subresource: str = "", dry_run: bool = False) -> T:
        """Writes an object that was read before. Raises `Conflict` if it was changed since."""
        path, query = _path_to(changed, subresource), self._query(dry_run=dry_run)
        return await self._server.put(path, document_of(changed), type(changed), query=query, deadline=self._timeout)

    async def apply(self, desired: T, *, force: bool = True, subresource: str = "", dry_run: bool = False) -> T:
        """Server-side apply: the server merges the fields of `desired`, and this client manages them.

        With `force` it takes over fields of other managers; without, these are a `Conflict`.
        """
        query = self._query(dry_run=dry_run) | {"force": "true" if force else "false"}
        return await self._server.patch(
            _path_to(desired, subresource), document_of(desired), APPLY_PATCH, type(desired), query=query,
            deadline=self._timeout,
        )  # fmt: skip

    async def patch(
        self,
        kind: type[T],
        name: str,
        change: Mapping[str, object] | Sequence[Mapping[str, object]],
        *,
        namespace: str = "",
        subresource: str = "",
        dry_run: bool = False,
    ) -> T:
        """Changes an object by a merge patch (a mapping) or a JSON patch (a sequence of operations)."""
        path = path_of(kind, namespace, name, subresource)
        content_type = MERGE_PATCH if isinstance(change, Mapping) else JSON_PATCH
        query = self._query(dry_run=dry_run)
        return await self._server.patch(path, change, content_type, kind, query=query, deadline=self._timeout)

    async def delete(
        self,
        kind: type[Object],
        name: str,
        namespace: str = "",
        *,
        propagation: Propagation = "Background",
        uid: str | None = None,
        resource_version: str | None = None,
        dry_run: bool = False,
    ) -> bool:
        """Deletes an object, the one with this uid and resource version if given. Returns False if there is none.

        Raises `Conflict` if the object has others.
        """
        options: dict[str, object] = {"propagationPolicy": propagation}
        if preconditions := {
            key: value for key, value in (("uid", uid), ("resourceVersion", resource_version)) if value
        }:
            options["preconditions"] = preconditions
        if dry_run:
            # The server ignores query parameters of a request that has DeleteOptions.
            options["dryRun"] = ["All"]
        try:
            await self._server.delete(path_of(kind, namespace, name), options=options, deadline=self._timeout)
        except NotFound:
            return False
        return True

    def watch(
        self, kind: type[Object], selection: Selection, resource_version: str, *, duration: float, idle: float
    ) -> AsyncGenerator[Watched, None]:
        """The events after a resource version, for `duration` seconds or up to twice as long.

        Raises `Gone` if that version is too old, and `WatchIdleTimeout` if nothing was received for `idle` seconds:
        the server sends a bookmark every minute, if an object of the kind has changed since the watch began.
        """
        return self._server.watch(
            path_of(kind, selection.namespace),
            msgspec.Raw,
            resource_version=resource_version,
            query=_selectors(selection) | {"allowWatchBookmarks": "true"},
            # As client-go does, so that not all watches of a server end at the same time.
            duration=duration * (1 + random.random()),  # noqa: S311 no secret
            idle=idle,
            accept=_accept(kind),
        )

    def without_rate_limit(self) -> "Client":
        """The same client and connections, for requests that must not wait behind others, as a lease's renewal."""
        unlimited = copy.copy(self)
        unlimited._server = self._server.without_rate_limit()
        return unlimited

    def _count(self, method: str, status: str) -> None:
        self.metrics.requests.labels(status, self._server.address, method).inc()

    def _query(self, *, dry_run: bool) -> dict[str, str]:
        return {"fieldManager": self.field_manager} | ({"dryRun": "All"} if dry_run else {})


def _check_fence() -> None:
    FENCE.get()()


def path_of(kind: type[Object], namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of an object, or of all of a kind (in one namespace, or, with an empty one, in all).

    Raises `ValueError` for names that cannot be part of a path, and for a name without its namespace.
    """
    info = api_of(kind)
    group = info.parent or info.resource
    if not is_namespaced(kind):
        namespace = ""
    elif name and not namespace:
        raise ValueError(f"{info.resource.kind} {name}: expected a namespace")
    try:
        return resource_path(
            group.group, group.version, info.plural, namespace=namespace, name=name, subresource=subresource
        )
    except ValueError as error:
        raise ValueError(f"{info.resource.kind} {name!a} in namespace {namespace!a}: {error}") from None


def _path_to(thing: Object, subresource: str) -> str:
    metadata = metadata_of(thing)
    return path_of(type(thing), metadata.namespace or "", metadata.name or "", subresource)


def _accept(kind: type[Object], list_suffix: str = "") -> str:
    """The Accept header of a read. For a kind with only `metadata`, the server sends the metadata alone.

    The complete status of a node, sent with each heartbeat, is a hundred times larger.
    """
    if not metadata_only(kind):
        return JSON
    return f"{JSON};as=PartialObjectMetadata{list_suffix};g=meta.k8s.io;v=v1,{JSON};q=0.5"


def _selectors(selection: Selection) -> dict[str, str]:
    chosen = {"labelSelector": selection.labels, "fieldSelector": selection.fields}
    return {name: value for name, value in chosen.items() if value}
