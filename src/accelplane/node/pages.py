"""The agent's HTTP pages: /metrics, /healthz, /readyz and /status."""

import contextlib
import logging
import ssl
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from accelplane.http.connection import Handler, PendingResponse
from accelplane.http.messages import PAGE_LIMITS, Request, Response
from accelplane.http.server import HttpServer, split_address
from accelplane.node import metrics
from accelplane.node.exposition import CONTENT_TYPE, Family
from accelplane.node.settings import ConfigurationError
from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus

log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"

Measure = Callable[[], Awaitable[metrics.Contents]]


class Access(Struct, frozen=True):
    """Who may read the pages: all clients, those that `authorize` lets pass, and those with a certificate."""

    tls: ssl.SSLContext | None = None
    authorize: Callable[[Handler], Handler] = lambda handler: handler


OPEN = Access()

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class PageCounts:
    """How long pages took to make; each page shows those before it."""

    def __init__(self) -> None:
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def record(self, page: str, seconds: float) -> None:
        self._buckets.setdefault(page, [0] * (len(_BOUNDS) + 1))[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds[page] = self._seconds.get(page, 0.0) + seconds

    def families(self) -> Sequence[Family]:
        took = Family("accelplane_page_seconds", "Time to make a page.", "histogram")
        for page, buckets in self._buckets.items():
            took.add_histogram(_BOUNDS, buckets, self._seconds[page], {"page": page})
        return (took,) if took.has_samples else ()


@contextlib.asynccontextmanager
async def serving(
    address: str, status: Callable[[], NodeStatus], measure: Measure, access: Access = OPEN
) -> AsyncGenerator[None]:
    """Serves the pages at `address` (`host:port`, or `:port` for all addresses) while entered.

    Raises `ConfigurationError` if the address cannot be bound.
    """
    server = HttpServer(access.authorize(_handler(status, measure)), PAGE_LIMITS, methods=("GET", "HEAD"))
    try:
        await server.start(*split_address(address), access.tls)
    except ValueError as error:
        raise ConfigurationError(f"-http-address: {address!a}: expected host:port") from error
    except OSError as error:
        raise ConfigurationError(f"-http-address: {address}: {error.strerror or error}") from error
    scheme = "https" if access.tls else "http"
    log.info("pages at %s", ", ".join(f"{scheme}://{_authority(*each)}" for each in server.addresses))
    try:
        yield
    finally:
        await server.stop(grace=1.0)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _handler(status: Callable[[], NodeStatus], measure: Measure) -> Handler:
    counts = PageCounts()

    async def metrics_page() -> Response:
        start = time.monotonic()
        contents = await measure()
        page = metrics.page(status(), contents, counts.families())
        counts.record("metrics", time.monotonic() - start)
        return Response(200, page, CONTENT_TYPE)

    def handle(request: Request) -> Response | PendingResponse:
        match request.path:
            case "/metrics":
                return metrics_page()
            case "/status":
                return Response(200, msgspec.json.format(msgspec.json.encode(_report(status())), indent=2))
            case "/healthz":
                return _check(status().unhealthy)
            case "/readyz":
                return _check(status().unready)
            case _:
                return Response(404, b"not found; expected /metrics, /healthz, /readyz or /status\n", _TEXT)

    return handle


def _check(problems: Iterable[str]) -> Response:
    text = "".join(f"{problem}\n" for problem in problems)
    return Response(503, text.encode(errors="replace"), _TEXT) if text else Response(200, b"ok\n", _TEXT)


def _report(status: NodeStatus) -> dict[str, object]:
    """The content of `/status`."""
    return {
        "version": status.version,
        "kubelet-dir": status.kubelet_dir,
        "root": status.root,
        "config-problem": status.config_problem,
        "not-ready": list(status.unready),
        "plugins": {name: _plugin(plugin) for name, plugin in status.plugins.items()},
    }


def _plugin(plugin: PluginStatus) -> dict[str, object]:
    return {
        "namespace": plugin.namespace,
        "scan": {
            "problem": plugin.scan.problem,
            "scans": plugin.scan.count,
            "failures": plugin.scan.failures,
            "seconds": round(plugin.scan.seconds, 6),
        },
        "resources": {resource.name: _resource(resource) for resource in plugin.resources.values()},
        "health": plugin.health,
        "skipped": plugin.skipped,
    }


def _resource(resource: ResourceStatus) -> dict[str, object]:
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
                "attributes": device.attributes,
            }
            for device in resource.devices.values()
        ],
    }
