"""Requests to the API server: typed objects in and out, and the errors of `apiserver.errors`.

lightkube brings the kinds, kubeconfig files, credentials (the token of a service account is read again when it was
replaced) and TLS; httpx2 does the HTTP, over `transport` unless there are proxies. The requests are made here, because
lightkube's watch asks for no bookmarks, decodes a list all or nothing, and waits for ever on a server that went silent.

Memory that was taken once is seldom given back, so lists are read in small pages, and few at a time.

Facts: Kubernetes API concepts (paths, list chunks, watch, bookmarks, patch media types), RFC 3339.
"""

import asyncio
import contextlib
import functools
import logging
import os
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Generic, Literal, TypeVar

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams, user_auth, verify_cluster
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError
from yaml import YAMLError

from accelplane.apiserver import DecodeError, NotFound, StatusError, Unreachable, WatchIdleTimeout
from accelplane.apiserver.errors import status_error

from .metrics import Metrics
from .objects import Object, api_of, document_of, is_namespaced, metadata_of, metadata_only
from .transport import Transport

APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML, too
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"

# etcd takes no object above 1.5 MiB; what the server adds to it is far from this.
MAX_EVENT = 8 * 1024 * 1024
# What is read in one piece takes several times its size for a moment, and the process keeps that.
PAGE = 100
_READ_AT_ONCE = 2

# a line for each request, of which a leader makes one every second
logging.getLogger("httpx2").setLevel(logging.WARNING)

_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}

# Asked before each write of a task and of those that it starts; what it raises is raised instead.
FENCE: ContextVar[Callable[[], None]] = ContextVar("fence", default=lambda: None)

T = TypeVar("T", bound=Object)
Propagation = Literal["Background", "Foreground", "Orphan"]


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """A list as of one resource version; `unreadable` are the items that are not of the type, undecoded."""

    items: Sequence[T]
    unreadable: Sequence[tuple[msgspec.Raw, str]]
    resource_version: str


class Watched(msgspec.Struct, frozen=True):
    """One event of a watch, its object not yet decoded."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _ListMetadata(msgspec.Struct, frozen=True):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    rest: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct, frozen=True):
    # The API writes null for a list of nothing.
    items: list[msgspec.Raw] | None = None
    metadata: _ListMetadata = _ListMetadata()


class Selection(msgspec.Struct, frozen=True):
    """Which objects of a kind: of one namespace or of all, by label and field selectors."""

    namespace: str = ""
    labels: str = ""
    fields: str = ""


def load_config(kubeconfig: str = "") -> SingleConfig:
    """How to reach the API server: the file named, `KUBECONFIG`, a pod's service account, or `~/.kube/config`.

    Raises `lightkube.core.exceptions.ConfigError`.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG", "")
    if not path and "KUBERNETES_SERVICE_HOST" in os.environ:
        path, load = "the service account", KubeConfig.from_service_account
    else:
        path = path or DEFAULT_KUBECONFIG
        load = functools.partial(KubeConfig.from_file, path)
    try:
        found = load().get()
    except (ConfigError, LookupError, AttributeError, TypeError, ValueError, OSError, YAMLError) as error:
        # lightkube looks at nothing before it uses it
        raise ConfigError(f"{path}: {_cause(error)}; expected a kubeconfig file") from error
    if found is None:
        raise ConfigError(f"{path}: has no current context")
    return found


class Client:
    """The API server, for one program. Ends with `close`.

    Raises `lightkube.core.exceptions.ConfigError` for an address or certificates that cannot be used.
    """

    def __init__(
        self, config: SingleConfig, *, field_manager: str, metrics: Metrics | None = None, timeout: float = 10.0
    ) -> None:
        self.field_manager = field_manager
        self.namespace = config.namespace
        self.metrics = metrics or Metrics()
        self._timeout = timeout
        self._turn = asyncio.Semaphore(_READ_AT_ONCE)
        self._server = config.cluster.server
        user = config.user or User()
        try:
            self._http = _http(config, user, httpx2.Timeout(timeout))
        except (OSError, ValueError, httpx2.InvalidURL) as error:
            files = (config.cluster.certificate_auth, user.client_cert, user.client_key)
            named = "".join(f", {file}" for file in files if file)
            raise ConfigError(f"{config.fname or 'kubeconfig'}: {self._server}{named}: {_cause(error)}") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, kind: type[T], name: str, namespace: str = "") -> T:
        """One object. Raises `NotFound`."""
        path = path_of(kind, namespace, name)
        return _decode(await self._request("GET", path, accepts=_accepts(kind)), kind, f"GET {path}")

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

        An undecoded object is a view of its page, which stays in memory as long as the view: copy what is kept.
        Raises `Gone` if the continue token expired.
        """
        path = path_of(kind, selection.namespace)
        parameters = _selectors(selection) | {"limit": str(page)}
        while True:
            metadata, raws = await self._page(path, parameters, _accepts(kind, "List"))
            consume(raws)
            if not metadata.rest:
                return metadata.resource_version
            parameters["continue"] = metadata.rest
            del raws  # and the page with them, before the next one comes

    async def create(self, new: T) -> T:
        """Makes an object. Raises `AlreadyExists`."""
        # the server gives the name to some, and questions (TokenReview and the like) have none
        path = path_of(type(new), (new.metadata.namespace if new.metadata else "") or "")
        body = await self._request("POST", path, self._manager(), document_of(new))
        return _decode(body, type(new), f"POST {path}")

    async def replace(self, changed: T, *, subresource: str = "") -> T:
        """Writes an object that was read before. Raises `Conflict` when it is no longer what was read."""
        metadata = metadata_of(changed)
        path = path_of(type(changed), metadata.namespace or "", metadata.name or "", subresource)
        body = await self._request("PUT", path, self._manager(), document_of(changed))
        return _decode(body, type(changed), f"PUT {path}")

    async def replace_status(self, changed: T) -> T:
        """Writes an object's status alone. Raises `Conflict`."""
        return await self.replace(changed, subresource="status")

    async def apply(self, wanted: T, *, force: bool = True, subresource: str = "") -> T:
        """Server-side apply: the fields that `wanted` has become ours and as they are there, others stay.

        With `force`, a field that somebody else manages becomes ours; without, that is a `Conflict`.
        """
        metadata = metadata_of(wanted)
        path = path_of(type(wanted), metadata.namespace or "", metadata.name or "", subresource)
        parameters = self._manager() | {"force": "true" if force else "false"}
        body = await self._request("PATCH", path, parameters, document_of(wanted), APPLY_PATCH)
        return _decode(body, type(wanted), f"PATCH {path}")

    async def patch(
        self,
        kind: type[T],
        name: str,
        change: Mapping[str, object] | Sequence[Mapping[str, object]],
        *,
        namespace: str = "",
        subresource: str = "",
    ) -> T:
        """Changes an object: by a merge patch (a mapping) or a JSON patch (a sequence of operations)."""
        path = path_of(kind, namespace, name, subresource)
        media = MERGE_PATCH if isinstance(change, Mapping) else JSON_PATCH
        return _decode(await self._request("PATCH", path, self._manager(), change, media), kind, f"PATCH {path}")

    async def delete(
        self,
        kind: type[Object],
        name: str,
        namespace: str = "",
        *,
        propagation: Propagation = "Background",
        uid: str | None = None,
    ) -> bool:
        """Deletes an object, the one with this uid if given. False when there is none.

        Raises `Conflict` when there is one of another uid.
        """
        options: dict[str, object] = {"propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._request("DELETE", path_of(kind, namespace, name), body=options)
        except NotFound:
            return False
        return True

    async def watch(
        self, kind: type[Object], selection: Selection, resource_version: str, *, lasting: float, silence: float
    ) -> AsyncGenerator[Watched, None]:
        """What happens after a resource version, until the server ends it after about `lasting` seconds.

        Raises `Gone` when that version is too old, and `WatchIdleTimeout` when nothing came for `silence` seconds: the
        server sends a bookmark every minute, if anything of the kind changed since it began.
        """
        path = path_of(kind, selection.namespace)
        parameters = _selectors(selection) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            # as other clients do, lest all watches of a server end at the same time
            "timeoutSeconds": str(int(lasting * (1 + random.random()))),  # noqa: S311 no secret
        }
        name = f"WATCH {path}"
        request = self._http.build_request(
            "GET", path, params=parameters, headers=_accepts(kind), timeout=httpx2.Timeout(self._timeout, read=silence)
        )
        try:
            answer = await self._send(request, name)
            try:
                if not answer.is_success:
                    raise _status_error(name, answer, await answer.aread())
                async for line in _lines(answer, name, silence):
                    event = _decode(line, Watched, name)
                    if event.type == "ERROR":
                        raise status_error(name, 0, event.object)
                    yield event
            finally:
                await answer.aclose()
        except (httpx2.HTTPError, OSError, ssl.SSLError) as error:
            raise Unreachable(name, f"{self._server}: {_cause(error)}") from error

    async def _page(
        self, path: str, parameters: Mapping[str, str], accepts: Mapping[str, str]
    ) -> tuple[_ListMetadata, Sequence[msgspec.Raw]]:
        """One page of a list, which is held for as long as one of its items is."""
        body = await self._request("GET", path, parameters, accepts=accepts, in_turn=True)
        part = _decode(body, _List, f"GET {path}")
        return part.metadata, part.items or ()

    async def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None = None,
        body: object = None,
        media: str = "application/json",
        *,
        accepts: Mapping[str, str] | None = None,
        in_turn: bool = False,
    ) -> bytes:
        name = f"{method} {path}"
        if method != "GET":
            FENCE.get()()
        content = None if body is None else msgspec.json.encode(body)
        headers = dict(accepts or {}) if content is None else {"Content-Type": media}
        request = self._http.build_request(method, path, params=parameters, content=content, headers=headers)
        try:
            # httpx's time-outs are for each piece of an answer, however many there are
            async with asyncio.timeout(3 * self._timeout):
                answer = await self._send(request, name)
                try:
                    async with self._turn if in_turn else contextlib.nullcontext():
                        text = await answer.aread()
                finally:
                    await answer.aclose()
        except (httpx2.HTTPError, OSError, ssl.SSLError) as error:
            raise Unreachable(name, f"{self._server}: {_cause(error)}") from error
        if not answer.is_success:
            raise _status_error(name, answer, text)
        return text

    async def _send(self, request: httpx2.Request, name: str) -> httpx2.Response:
        code = "<error>"
        try:
            answer = await self._http.send(request, stream=True)
            code = str(answer.status_code)
        except ConfigError as error:
            raise Unreachable(name, f"no credentials: {error}") from error
        finally:
            self.metrics.requests.labels(code, request.url.host, request.method).inc()
        return answer

    def _manager(self) -> dict[str, str]:
        return {"fieldManager": self.field_manager}


def _http(config: SingleConfig, user: User, timeout: httpx2.Timeout) -> httpx2.AsyncClient:
    if _PROXIES & {name.lower() for name in os.environ}:
        return AsyncClient(config._replace(user=user), ConnectionParams(timeout=timeout))
    server = config.cluster.server
    secure = httpx2.URL(server).scheme == "https"
    context = verify_cluster(config.cluster, user, config.abs_file) if secure else None
    return httpx2.AsyncClient(base_url=server, auth=user_auth(user), timeout=timeout, transport=Transport(context))


def _accepts(kind: type[Object], list_suffix: str = "") -> dict[str, str]:
    """A header for what is read: of a kind that has its metadata alone, the server need not send more.

    The whole status of a node, which comes with each of its heartbeats, is a hundred times that.
    """
    if not metadata_only(kind):
        return {}
    partial = f"as=PartialObjectMetadata{list_suffix};g=meta.k8s.io;v=v1"
    return {"Accept": f"application/json;{partial},application/json;q=0.5"}


def path_of(kind: type[Object], namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Where the API keeps an object, or all of a kind (in one namespace, or, with an empty one, in all)."""
    info = api_of(kind)
    group = info.parent or info.resource
    parts = ["apis", group.group, group.version] if group.group else ["api", group.version]
    if is_namespaced(kind) and namespace:
        parts += ["namespaces", namespace]
    elif is_namespaced(kind) and name:
        raise ValueError(f"{info.resource.kind} {name}: expected a namespace")
    parts.append(info.plural)
    parts += [part for part in (name, subresource) if part]
    if any("/" in part or part in {"", ".", ".."} for part in parts[1:]):
        raise ValueError(f"{info.resource.kind} {name!a} in namespace {namespace!a}: cannot be part of a path")
    return "/" + "/".join(parts)


def _status_error(name: str, answer: httpx2.Response, text: bytes) -> StatusError:
    retry_after = answer.headers.get("Retry-After", "")
    return status_error(name, answer.status_code, text, phrase=answer.reason_phrase, retry_after=retry_after)


async def _lines(answer: httpx2.Response, name: str, silence: float) -> AsyncGenerator[bytes, None]:
    rest = bytearray()
    pieces = answer.aiter_bytes()
    while True:
        try:
            piece = await anext(pieces, None)
        except httpx2.ReadTimeout as error:
            raise WatchIdleTimeout(name, f"told nothing for {silence:g} s") from error
        if piece is None:
            break
        rest += piece
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line.strip():
                yield line
        if len(rest) > MAX_EVENT:
            raise DecodeError(name, f"an event of more than {MAX_EVENT} bytes")
    if rest.strip():
        yield bytes(rest)


Decoded = TypeVar("Decoded")


def _decode(text: bytes, kind: type[Decoded], name: str) -> Decoded:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(name, f"the answer is no {kind.__name__}: {error}") from error


def _selectors(selection: Selection) -> dict[str, str]:
    chosen = {"labelSelector": selection.labels, "fieldSelector": selection.fields}
    return {name: value for name, value in chosen.items() if value}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
