"""Requests to one API server: JSON in and out, decoded into the type that the caller names.

Facts: Kubernetes API concepts (lists in pages, watches, patch media types, dry run), client-go (rate limit, retries of
requests that the server rejects with Retry-After).
"""

import asyncio
import contextlib
import copy
import os
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from accelplane.apiserver.config import ClientConfig
from accelplane.apiserver.credentials import Credentials
from accelplane.apiserver.discovery import SERVICE_ACCOUNT, in_cluster
from accelplane.apiserver.errors import (
    DecodeError,
    NoCredentials,
    StatusError,
    Unreachable,
    WatchIdleTimeout,
    status_error,
)
from accelplane.apiserver.ratelimit import RateLimit
from accelplane.http.client import HttpClient, HttpClientError, ProtocolError, Proxy, Response

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML

# etcd stores objects of up to 1.5 MiB by default; managed fields are part of them.
MAX_OBJECT = 8 * 1024 * 1024
MAX_PAGE = 128 * 1024 * 1024
DEADLINE = 15.0

_MAX_ATTEMPTS = 10  # as client-go
_MAX_ERROR = 64 * 1024
_WATCH_GRACE = 1.0  # for a server to end a watch by itself, so that its connection can be used again
_PAGES_AT_ONCE = 2

_HOST = re.compile(r"[0-9A-Za-z._:%-]+")

T = TypeVar("T")
Query: TypeAlias = Mapping[str, str] | None


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: T


class _ListMetadata(msgspec.Struct, frozen=True):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continue_token: str | None = msgspec.field(name="continue", default=None)


class ObjectList(msgspec.Struct, frozen=True):
    """A page of a collection with undecoded objects. The API writes null for an empty list."""

    items: list[msgspec.Raw] | None = None
    metadata: _ListMetadata = _ListMetadata()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Query = None
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON

    @property
    def name(self) -> str:
        """The request in messages."""
        return f"{self.method} {self.path}"


class ApiServer:
    """One server. Methods raise `ApiError`; `deadline` is the time of a request with its retries, in seconds.

    Without `idle_timeout` each request has its own connection, for programs that seldom send one. `before_write` is
    called before each request other than GET; an exception prevents the request. `on_response` is called with
    method and status of each response, `<error>` without one.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        idle_timeout: float = 0.0,
        rate_limit: RateLimit | None = None,
        before_write: Callable[[], None] = lambda: None,
        on_response: Callable[[str, str], None] = lambda _method, _status: None,
    ) -> None:
        """Raises `NoCredentials` for an address that cannot be used."""
        self._credentials = Credentials(config)
        self._rate_limit: RateLimit | None = rate_limit or RateLimit()
        self._before_write = before_write
        self._on_response = on_response
        self._reads = asyncio.Semaphore(_PAGES_AT_ONCE)
        self._secure, host, port, self._prefix = _split(config.server)
        self._http = HttpClient(
            host,
            port,
            context=self._credentials.context if self._secure else None,
            server_name=config.server_name,
            proxy=_proxy(config, host, port) if self._secure else None,
            idle_timeout=idle_timeout,
        )

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] | None = None, directory: str = SERVICE_ACCOUNT) -> "ApiServer":
        """The server of the cluster that this pod is in. Raises `NoCredentials`."""
        return cls(in_cluster(environment, directory))

    @property
    def address(self) -> str:
        """`host:port`."""
        return self._http.authority

    def check(self) -> None:
        """Raises `NoCredentials` if certificates or a token cannot be used."""
        self._credentials.check(secure=self._secure)

    def without_rate_limit(self) -> "ApiServer":
        """The same server and connections, for requests that must not wait behind others."""
        unlimited = copy.copy(self)
        unlimited._rate_limit = None
        return unlimited

    def close(self) -> None:
        """Closes the idle connections."""
        self._http.close()

    async def get(
        self,
        path: str,
        kind: type[T],
        *,
        query: Query = None,
        accept: str = JSON,
        deadline: float = DEADLINE,
        limit: int = MAX_OBJECT,
    ) -> T:
        """The object at `path`."""
        request = _Request("GET", path, query, accept=accept)
        return _decode(await self._send(request, deadline, limit), kind, request.name)

    async def post(
        self, path: str, body: object, kind: type[T], *, query: Query = None, deadline: float = DEADLINE
    ) -> T:
        """Creates an object, and returns it."""
        return await self._write(_Request("POST", path, query, msgspec.json.encode(body)), kind, deadline)

    async def put(
        self, path: str, body: object, kind: type[T], *, query: Query = None, deadline: float = DEADLINE
    ) -> T:
        """Replaces the object at `path`, and returns it."""
        return await self._write(_Request("PUT", path, query, msgspec.json.encode(body)), kind, deadline)

    async def patch(
        self, path: str, body: object, content_type: str, kind: type[T], *, query: Query = None,
        deadline: float = DEADLINE,
    ) -> T:  # fmt: skip
        """Changes the object at `path`, and returns it."""
        request = _Request("PATCH", path, query, msgspec.json.encode(body), content_type)
        return await self._write(request, kind, deadline)

    async def delete(self, path: str, *, options: object = None, deadline: float = DEADLINE) -> None:
        """Deletes the object at `path`. With `options`, its DeleteOptions, the server ignores parameters of the URL."""
        body = None if options is None else msgspec.json.encode(options)
        await self._send(_Request("DELETE", path, body=body), deadline, MAX_OBJECT)

    async def list(
        self,
        path: str,
        consume: Callable[[Sequence[msgspec.Raw]], None],
        *,
        query: Query = None,
        page: int = 100,
        accept: str = JSON,
        deadline: float = DEADLINE,
        limit: int = MAX_PAGE,
    ) -> str:
        """Reads a collection, `page` objects at a time; returns its resource version. Each page has its own deadline.

        A page of more than `limit` bytes is an error.

        `consume` gets the undecoded objects, which are views of the complete page: copy parts that are stored. Raises
        `Gone` if the continue token expired.
        """
        parameters = {**(query or {}), "limit": str(page)}
        while True:
            request = _Request("GET", path, parameters, accept=accept)
            content = await self._send(request, deadline, limit, self._reads)
            found = _decode(content, ObjectList, request.name)
            consume(found.items or ())
            if not found.metadata.continue_token:
                return found.metadata.resource_version
            parameters["continue"] = found.metadata.continue_token
            del content, found  # before the next page is read

    async def watch(
        self,
        path: str,
        kind: type[T],
        *,
        resource_version: str = "",
        query: Query = None,
        duration: float = 300.0,
        idle: float | None = None,
        accept: str = JSON,
        limit: int = MAX_OBJECT,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        """The changes of a collection for `duration` seconds; close it (`contextlib.aclosing`) when leaving early.

        Raises `Gone` if the changes since `resource_version` are no longer stored, and `WatchIdleTimeout` if nothing is
        received for `idle` seconds. An event of more than `limit` bytes is an error. Opening counts as one request.
        """
        parameters = {**(query or {}), "watch": "true", "timeoutSeconds": str(max(1, round(duration)))}
        if resource_version:
            parameters["resourceVersion"] = resource_version
        request = _Request("GET", path, parameters, accept=accept)
        name = f"WATCH {path}"
        await self._acquire()
        end = asyncio.get_running_loop().time() + duration + _WATCH_GRACE
        async with contextlib.AsyncExitStack() as stack:
            async with _deadline(name, DEADLINE):
                response = await stack.enter_async_context(self._response(request, name))
                if response.status != 200:
                    raise await _status_error(name, response)
            lines = await stack.enter_async_context(contextlib.aclosing(_lines(response, name, limit, end, idle)))
            async for line in lines:
                yield _event(name, line, kind)

    async def _write(self, request: _Request, kind: type[T], deadline: float) -> T:
        return _decode(await self._send(request, deadline, MAX_OBJECT), kind, request.name)

    async def _send(
        self, request: _Request, deadline: float, limit: int, turn: asyncio.Semaphore | None = None
    ) -> bytes:
        """The body of a successful response. Retries requests that the server rejects temporarily."""
        await self._acquire()
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        async with _deadline(request.name, deadline):
            attempt = 1
            while True:
                try:
                    return await self._attempt(request, limit, turn)
                except StatusError as error:
                    delay = self._retry_delay(request, error, attempt)
                    if delay is None or loop.time() + delay >= end:
                        raise
                attempt += 1
                await asyncio.sleep(delay)
                await self._acquire()

    async def _attempt(self, request: _Request, limit: int, turn: asyncio.Semaphore | None) -> bytes:
        async with self._response(request, request.name) as response:
            if not 200 <= response.status < 300:
                raise await _status_error(request.name, response)
            async with turn or contextlib.nullcontext():
                return await response.read(limit)

    def _retry_delay(self, request: _Request, error: StatusError, attempt: int) -> float | None:
        """The seconds until the request is sent again, None if it is not."""
        if attempt >= _MAX_ATTEMPTS:
            return None
        if error.code == 401:
            return 0.0 if attempt == 1 and self._credentials.reject() else None
        # The server did not process requests with these; it may have processed one with another 5xx.
        rejected = error.code in (429, 503) or (error.code >= 500 and request.method == "GET")
        return error.retry_after if rejected and error.retry_after > 0 else None

    async def _acquire(self) -> None:
        if self._rate_limit is not None:
            await self._rate_limit.acquire()

    @contextlib.asynccontextmanager
    async def _response(self, request: _Request, name: str) -> AsyncGenerator[Response]:
        """One exchange. Raises `ApiError`."""
        fields = [("Accept", request.accept), ("User-Agent", "accelplane")]
        if request.body is not None:
            fields.append(("Content-Type", request.content_type))
        before_send = self._before_write if request.method != "GET" else lambda: None
        query = f"?{urlencode(request.query)}" if request.query else ""
        target = self._prefix + request.path + query
        status = "<error>"
        try:
            if authorization := await self._credentials.authorization():
                fields.append(("Authorization", authorization))
            try:
                exchange = self._http.request(request.method, target, fields, request.body, before_send=before_send)
                async with exchange as response:
                    status = str(response.status)
                    self._on_response(request.method, status)
                    yield response
            finally:
                if status == "<error>":
                    self._on_response(request.method, status)
        except ProtocolError as error:
            raise DecodeError(name, f"{self.address}: {error}") from error
        except HttpClientError as error:
            problem = str(error)  # an error of the connection begins with the address
            raise Unreachable(
                name, problem if problem.startswith(self.address) else f"{self.address}: {problem}"
            ) from error


def _split(url: str) -> tuple[bool, str, int, str]:
    """Whether it is https, host, port and path prefix. Raises `NoCredentials`."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        secure, host = parts.scheme == "https", parts.hostname or ""
        unexpected = parts.query or parts.fragment or parts.username or not _HOST.fullmatch(host)
        if parts.scheme in ("https", "http") and not unexpected:
            return secure, host, parts.port or (443 if secure else 80), parts.path.rstrip("/")
    raise NoCredentials("address of the API server", f"found {url[:200]!a}, expected https://host:port")


def _proxy(config: ClientConfig, host: str, port: int) -> Proxy | None:
    """Raises `NoCredentials` for a proxy that is not supported."""
    if not (config.proxy or "HTTPS_PROXY" in os.environ or "https_proxy" in os.environ):
        return None
    from accelplane.http.proxy import parse_proxy, proxy_from_environment  # noqa: PLC0415 - rarely needed

    try:
        return parse_proxy(config.proxy) if config.proxy else proxy_from_environment(host, port, os.environ)
    except ValueError as error:
        raise NoCredentials("proxy-url" if config.proxy else "HTTPS_PROXY", str(error)) from None


@contextlib.asynccontextmanager
async def _deadline(name: str, seconds: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unreachable(name, f"no complete response within {seconds:g} s") from None


async def _status_error(name: str, response: Response) -> StatusError:
    try:
        body = await response.read(_MAX_ERROR)
    except HttpClientError:
        body = b""  # the status is worth more than its explanation
    retry_after = response.fields.get("retry-after", "")
    return status_error(name, response.status, body, phrase=response.phrase, retry_after=retry_after)


async def _lines(
    response: Response, name: str, limit: int, end: float, idle: float | None
) -> AsyncGenerator[bytes, None]:
    """The lines of a body until its end, or until `end` of the loop's clock."""
    loop = asyncio.get_running_loop()
    buffer = bytearray()
    async with contextlib.aclosing(response.chunks()) as chunks:
        while True:
            try:
                async with asyncio.timeout_at(end if idle is None else min(end, loop.time() + idle)):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                if loop.time() >= end:
                    return
                raise WatchIdleTimeout(name, f"received nothing for {idle:g} s") from None
            if chunk is None:
                break
            searched = len(buffer)
            buffer += chunk
            while (newline := buffer.find(b"\n", searched)) >= 0:
                line = bytes(buffer[:newline])
                del buffer[: newline + 1]
                searched = 0
                if line.strip():
                    yield line
            if len(buffer) > limit:
                raise DecodeError(name, f"found an event of more than {limit} bytes")
    if buffer.strip():
        yield bytes(buffer)


def _event(name: str, line: bytes, kind: type[T]) -> WatchEvent[T]:
    event = _decode(line, _Event, name)
    match event.type:
        case "ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK":
            return WatchEvent(event.type, _decode(event.object, kind, name))
        case "ERROR":
            raise status_error(name, 0, event.object)
        case _:
            raise DecodeError(name, f"found an event of type {event.type[:40]!a}")


def _decode(content: bytes | msgspec.Raw, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(name, f"expected {kind.__name__} in JSON: {error}") from None
