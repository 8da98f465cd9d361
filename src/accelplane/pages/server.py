"""The agent's HTTP pages: /metrics, /healthz, /readyz, /status, /api/v1/inventory and /api/v1/readings."""

import asyncio
import contextlib
import gzip
import logging
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from accelplane import jsontext
from accelplane.devices import plain
from accelplane.host.blocking import in_thread
from accelplane.http.handler import Handler, PendingResponse
from accelplane.http.listening import is_own_host, split_address
from accelplane.http.messages import PAGE_LIMITS, HttpError, Request, Response, accepts_gzip
from accelplane.http.server import HttpServer
from accelplane.http.tls import ConnectionContext
from accelplane.http.validity import HELP, Validity
from accelplane.node.settings import ConfigurationError, is_loopback
from accelplane.node.status import NodeStatus, ResourceStatus
from accelplane.pages import current_values, metrics
from accelplane.pages.exposition import CONTENT_TYPE, Family
from accelplane.pages.observer import Observer

log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"
_FIELDS = ("accept-encoding", "host", "if-none-match")
_NAMES = {
    "/metrics": "metrics", "/status": "status", "/healthz": "healthz", "/readyz": "readyz",
    "/api/v1/inventory": "inventory", "/api/v1/readings": "readings",
}  # fmt: skip
_ALIASES = {"/health": "/healthz"}  # of squat's generic-device-plugin

# Pages that are made at the same time; further clients wait for `_TURN_TIMEOUT` seconds.
_MAX_CONCURRENT = 4
_TURN_TIMEOUT = 5.0
_PAGE_TIMEOUT = 15.0
_MAX_WAIT = 55
_WAIT = re.compile(r"[0-9]{1,4}")
_TAG = re.compile(r'"[^"]*"')
_GZIP_LEVEL = 1
_GZIP_INLINE = 512 * 1024  # larger ones are compressed in a thread
_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Access(Struct, frozen=True):
    """Who may read the pages: all clients, those that `authorize` lets pass, and those with a certificate.

    `restricted`: not all clients. `validity` is that of the serving certificate.
    """

    tls: ConnectionContext | None = None
    restricted: bool = False
    authorize: Callable[[Handler], Handler] = lambda handler: handler
    validity: Callable[[], Validity | None] = lambda: None


OPEN = Access()


@contextlib.asynccontextmanager
async def serving(
    address: str,
    status: Callable[[], NodeStatus],
    observer: Observer,
    access: Access = OPEN,
    options: metrics.PageOptions | None = None,
) -> AsyncGenerator[None]:
    """Serves the pages at `[host]:port` while entered. Raises `ConfigurationError` if that cannot be bound."""
    pages = _Pages(status, observer, options or metrics.PageOptions(), access.validity)
    try:
        handler = _counted(_for_own_hosts(access.authorize(pages.handle), address), pages.counts)
        server = HttpServer(handler, PAGE_LIMITS, methods=("GET", "HEAD"), fields=_FIELDS)
        await server.start(*split_address(address), access.tls)
    except ValueError as error:
        raise ConfigurationError(f"-http-address: found {address!a}, expected host:port") from error
    except OSError as error:
        raise ConfigurationError(f"-http-address: {address}: {error.strerror or error}") from error
    scheme = "https" if access.tls else "http"
    log.info("pages at %s", ", ".join(f"{scheme}://{_authority(*each)}" for each in server.addresses))
    if not access.restricted and not all(is_loopback(host) for host, _port in server.addresses):
        log.warning(
            "-http-address: found %s without -http-authorized or -http-client-ca: all clients that reach the port can "
            "read the pages; set one of these flags, a NetworkPolicy, or an address of 127.0.0.1",
            address,
        )
    try:
        yield
    finally:
        await server.stop(grace=1.0)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def certificate_families(validity: Validity | None) -> Iterator[Family]:
    """The validity of the serving certificate, nothing if it is unknown."""
    for name, seconds in (validity.samples() if validity is not None else {}).items():
        family = Family(name, f"{HELP[name]}.")
        family.add(seconds, {})
        yield family


class PageCounts:
    """How often pages were requested, and how long they took to make. Each metrics page shows those before it."""

    def __init__(self) -> None:
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._requests: Counter[tuple[str, int]] = Counter()

    def record(self, page: str, seconds: float) -> None:
        self._buckets.setdefault(page, [0] * (len(_SECONDS_BOUNDS) + 1))[bisect_left(_SECONDS_BOUNDS, seconds)] += 1
        self._seconds[page] = self._seconds.get(page, 0.0) + seconds

    def answered(self, page: str, code: int) -> None:
        self._requests[page, code] += 1

    def families(self) -> Sequence[Family]:
        took = Family("accelplane_page_seconds", "Time to make a page.", "histogram")
        for page, buckets in sorted(self._buckets.items()):
            took.add_histogram(_SECONDS_BOUNDS, buckets, self._seconds[page], {"page": page})
        requests = Family("accelplane_page_requests_total", "Requests of pages, by status code.", "counter")
        for (page, code), count in sorted(self._requests.items()):
            requests.add(count, {"page": page, "code": str(code)})
        return [family for family in (took, requests) if len(family)]


class _Pages:
    """The handler of all pages."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        observer: Observer,
        options: metrics.PageOptions,
        validity: Callable[[], Validity | None],
    ) -> None:
        self.counts = PageCounts()
        self._validity = validity
        self._status = status
        self._observer = observer
        self._page = metrics.MetricsPage(options)
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT)
        # The last inventory that a client requested in compressed form.
        self._compressed: tuple[str, bytes] = ("", b"")

    def handle(self, request: Request) -> Response | PendingResponse:
        match _ALIASES.get(request.path, request.path):
            case "/metrics":
                return self._metrics(request)
            case "/status":
                return self._status_page()
            case "/healthz":
                return _check(self._status().unhealthy)
            case "/readyz":
                return _check(self._status().unready)
            case "/api/v1/inventory":
                return self._inventory(request)
            case "/api/v1/readings":
                return self._readings(request)
            case _:
                expected = ", ".join(_NAMES)
                return Response(404, f"not found; expected one of {expected}\n".encode(), _TEXT)

    def _status_page(self) -> Response:
        start = time.monotonic()
        page = jsontext.indented(status_report(self._status())).encode()
        self.counts.record("status", time.monotonic() - start)
        return Response(200, page)

    async def _metrics(self, request: Request) -> Response:
        async with self._turn("metrics"):
            contents = await self._observer.contents()
            more = (*self.counts.families(), *certificate_families(self._validity()))
            page = self._page.render(self._status(), contents, more)
        return await _encoded(Response(200, page, CONTENT_TYPE), request)

    async def _readings(self, request: Request) -> Response:
        async with self._turn("readings"):
            page = current_values.document(await self._observer.readings(), time.time())
        return await _encoded(Response(200, page), request)

    async def _inventory(self, request: Request) -> Response:
        seconds = _wait(request)
        known = request.fields.get("if-none-match", "")
        # A reader that waits again gets from `next_inventory` what has changed since.
        found = self._observer.last_inventory(lambda etag: _matches(known, etag)) if seconds else None
        if found is None:
            async with self._turn("inventory"):
                found = await self._observer.inventory()
        if _matches(known, found.etag):
            changed = await self._observer.next_inventory(found.etag, seconds) if seconds else None
            if changed is None:
                return Response(304, b"", fields=_tag(found.etag))
            found = changed
        if not accepts_gzip(request):
            return Response(200, found.body, fields=_tag(found.etag))
        if self._compressed[0] != found.etag:
            self._compressed = found.etag, await _compressed(found.body)
        fields = {**_tag(_gzip_tag(found.etag)), "Content-Encoding": "gzip"}
        return Response(200, self._compressed[1], fields=fields)

    @contextlib.asynccontextmanager
    async def _turn(self, page: str) -> AsyncGenerator[None]:
        """Limits the number of pages that are made at the same time, and their time. Raises `HttpError`."""
        try:
            async with asyncio.timeout(_TURN_TIMEOUT):
                await self._turns.acquire()
        except TimeoutError:
            raise HttpError(503, f"{_MAX_CONCURRENT} pages are being made; try again later") from None
        start = time.monotonic()
        try:
            async with asyncio.timeout(_PAGE_TIMEOUT):
                yield
        except TimeoutError:
            raise HttpError(503, f"the page was not complete within {_PAGE_TIMEOUT:g} s") from None
        finally:
            self._turns.release()
            self.counts.record(page, time.monotonic() - start)


def _for_own_hosts(handler: Handler, address: str) -> Handler:
    """The handler, which on the loopback interface answers only to names of the own machine."""
    host, _ = split_address(address)
    if host is None or not is_loopback(host):
        return handler

    def handle(request: Request) -> Response | PendingResponse:
        if not is_own_host(request.fields.get("host", "localhost")):  # browsers always send it
            raise HttpError(421, "expected the address localhost or 127.0.0.1 in the Host field")
        return handler(request)

    return handle


def _counted(handler: Handler, counts: PageCounts) -> Handler:
    """The handler with counted answers. A request whose client disconnects before the answer is not counted."""

    async def handle(request: Request) -> Response:
        code = 500
        try:
            response = handler(request)
            if not isinstance(response, Response):
                response = await response
            code = response.status
            return response
        except HttpError as error:
            code = error.status
            raise
        except asyncio.CancelledError:
            code = 0
            raise
        finally:
            if code:
                counts.answered(_NAMES.get(request.path, "other"), code)

    return handle


def status_report(status: NodeStatus) -> dict[str, object]:
    """The content of `/status`."""
    return {
        "version": status.version,
        "kubelet-dir": status.kubelet_dir,
        "root": status.root,
        "config-problem": status.config_problem,
        "not-ready": list(status.unready),
        "skipped-plugins": status.skipped_plugins,
        "plugins": {
            name: {
                "namespace": plugin.namespace,
                "scan": {
                    "problem": plugin.scan.problem,
                    "scans": plugin.scan.count,
                    "failures": plugin.scan.failures,
                    "seconds": round(plugin.scan.seconds, 6),
                },
                "resources": {resource.name: _resource_report(resource) for resource in plugin.resources.values()},
                "health": plugin.health,
                "skipped": plugin.skipped,
                "problems": plugin.problems,
            }
            for name, plugin in status.plugins.items()
        },
        "dra": {
            name: {field.replace("_", "-"): value for field, value in structs.asdict(driver).items()}
            for name, driver in status.dra.items()
        },
    }


def _resource_report(resource: ResourceStatus) -> dict[str, object]:
    return {
        "stage": resource.stage,
        "problem": resource.problem,
        "devices": [
            {
                "id": device.id,
                "unit": device.unit,
                "health": device.health,
                "reason": device.reason,
                "numa": device.topology,
                "attributes": plain(device.attributes),
            }
            for device in resource.devices.values()
        ],
    }


def _check(problems: Iterable[str]) -> Response:
    text = "".join(f"{problem}\n" for problem in problems)
    return Response(503, text.encode(errors="replace"), _TEXT) if text else Response(200, b"ok\n", _TEXT)


def _wait(request: Request) -> int:
    """The seconds that the client waits for a change. Raises `HttpError`."""
    for option in request.query.split("&"):
        name, _, value = option.partition("=")
        if name == "wait":
            if not _WAIT.fullmatch(value):
                raise HttpError(400, f"wait: found {value[:20]!a}, expected seconds")
            return min(int(value), _MAX_WAIT) if request.method == "GET" else 0
    return 0


def _matches(known: str, etag: str) -> bool:
    """Whether the field If-None-Match names this entity tag, plain or compressed."""
    return known.strip() == "*" or not {etag, _gzip_tag(etag)}.isdisjoint(_TAG.findall(known))


def _tag(etag: str) -> Mapping[str, str]:
    return {"ETag": etag, "Vary": "Accept-Encoding", "Cache-Control": "no-cache"}


def _gzip_tag(etag: str) -> str:
    return f'{etag[:-1]}-gzip"'


async def _encoded(response: Response, request: Request) -> Response:
    """The response, compressed if the client accepts that."""
    if not accepts_gzip(request):
        return Response(response.status, response.body, response.content_type, {"Vary": "Accept-Encoding"})
    body = await _compressed(bytes(response.body))
    fields = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(response.status, body, response.content_type, fields)


async def _compressed(body: bytes) -> bytes:
    # Without the time: equal pages are equal bytes.
    if len(body) <= _GZIP_INLINE:
        return gzip.compress(body, _GZIP_LEVEL, mtime=0)
    return await in_thread(lambda: gzip.compress(body, _GZIP_LEVEL, mtime=0))
