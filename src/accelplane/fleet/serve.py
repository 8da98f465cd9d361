"""The listeners of the fleet page."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from accelplane.http.listening import is_own_host, split_address
from accelplane.http.messages import HttpLimits
from accelplane.http.server import HttpServer
from accelplane.http.tls import ConnectionContext

from .web.gate import Gate
from .web.security import KEPT_FIELDS
from .web.site import Screens, Site

_METHODS = ("GET", "HEAD", "POST")
LIMITS = HttpLimits(
    body=32 * 1024, cached_heads=0, connections=320, backlog=256, memory=4 * 1024 * 1024, idle=75, linger=0.2
)


def open_gate(address: str, *, any_host: bool = False) -> Gate:
    """The gate of a plain listener. Raises `ValueError` for an address that is not host:port."""
    split_address(address)
    return Gate(loopback_only=is_own_host(address) and not any_host)


@asynccontextmanager
async def listen(
    screens: Screens,
    gate: Gate,
    address: str,
    *,
    tls: ConnectionContext | None = None,
    metrics: Callable[[], bytes] | None = None,
    limits: HttpLimits = LIMITS,
) -> AsyncGenerator[int]:
    """Serves the pages at an address, and yields the port.

    Raises `OSError`, and `ValueError` for an address that is not host:port.
    """
    host, port = split_address(address)
    server = HttpServer(Site(screens, gate, metrics), limits, methods=_METHODS, fields=KEPT_FIELDS)
    port = await server.start(host, port, tls)
    try:
        yield port
    finally:
        await server.stop()
