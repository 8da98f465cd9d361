"""The agent's HTTP pages: /metrics, /healthz, /readyz and /status."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

import msgspec

from accelplane.http.connection import Handler, PendingResponse
from accelplane.http.messages import PAGE_LIMITS, Request, Response
from accelplane.http.server import HttpServer, split_address
from accelplane.node import metrics
from accelplane.node.exposition import CONTENT_TYPE
from accelplane.node.settings import ConfigurationError
from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus

log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"

Measure = Callable[[], Awaitable[metrics.Contents]]


@contextlib.asynccontextmanager
async def serving(address: str, status: Callable[[], NodeStatus], measure: Measure) -> AsyncGenerator[None]:
    """Serves the pages at `address` (`host:port`, or `:port` for all addresses) while entered.

    Raises `ConfigurationError` if the address cannot be bound.
    """
    server = HttpServer(_handler(status, measure), PAGE_LIMITS, methods=("GET", "HEAD"))
    try:
        await server.start(*split_address(address))
    except ValueError as error:
        raise ConfigurationError(f"-http-address: {address!a}: expected host:port") from error
    except OSError as error:
        raise ConfigurationError(f"-http-address: {address}: {error.strerror or error}") from error
    log.info("pages at %s", ", ".join(f"http://{_authority(*each)}" for each in server.addresses))
    try:
        yield
    finally:
        await server.stop(grace=1.0)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _handler(status: Callable[[], NodeStatus], measure: Measure) -> Handler:
    async def metrics_page() -> Response:
        contents = await measure()
        return Response(200, metrics.page(status(), contents), CONTENT_TYPE)

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
