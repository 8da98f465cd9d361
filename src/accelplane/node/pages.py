"""The agent's HTTP pages: /metrics, /healthz, /readyz and /status.

uvicorn's protocol does the HTTP; its server is left out, because that one looks around ten times a second.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import ServerState

from accelplane.node import metrics, status
from accelplane.node.agent import Agent
from accelplane.node.settings import ConfigurationError

log = logging.getLogger(__name__)

_CONNECTIONS = 64
_KEEP_ALIVE = 30  # seconds; scrapers come about as often

Scope = MutableMapping[str, Any]
Answer = tuple[int, str, bytes]


@contextlib.asynccontextmanager
async def serving(agent: Agent, address: str) -> AsyncGenerator[None]:
    """Serves the pages at `address` (`host:port`, `:port` for all addresses) while entered.

    Raises `ConfigurationError` when that address cannot be had.
    """
    host, port = _host_and_port(address)
    config = uvicorn.Config(
        _application(agent, metrics.Readings(agent)),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        # Descriptors that strangers hold would be missing for the kubelet.
        if len(state.connections) >= _CONNECTIONS:
            return _Refusal()
        # Typed in uvicorn as "a class of some protocol", which says nothing of its arguments.
        make: Any = config.http_protocol_class
        connection = make(config=config, server_state=state, app_state={})
        state.connections.add(connection)  # as it will itself, but many may be accepted before
        # As after each request, so before the first one: a connection that says nothing ends.
        connection.timeout_keep_alive_task = loop.call_later(_KEEP_ALIVE, connection.timeout_keep_alive_handler)
        return connection

    try:
        server = await loop.create_server(protocol, host, port)
    except OSError as error:
        raise ConfigurationError(f"-http-address: {address}: {error.strerror or error}") from error
    log.info("pages at %s", ", ".join(f"http://{_shown(socket.getsockname())}" for socket in server.sockets))
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()


class _Refusal(asyncio.Protocol):
    """For a connection too many: ends it at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _application(agent: Agent, readings: metrics.Readings) -> Callable[..., Awaitable[None]]:
    async def application(scope: Scope, _receive: object, send: Callable[[Scope], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            return
        code, content_type, body = await _answer(agent, readings, scope["method"], scope["path"])
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return application


async def _answer(agent: Agent, readings: metrics.Readings, method: str, path: str) -> Answer:
    if method not in ("GET", "HEAD"):
        return 405, "text/plain", b"only GET and HEAD\n"
    match path:
        case "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", metrics.page(agent, await readings.take())
        case "/status":
            return 200, "application/json", msgspec.json.format(msgspec.json.encode(status.report(agent)), indent=2)
        case "/healthz":
            return _verdict(list(status.unhealthy(agent)))
        case "/readyz":
            return _verdict(list(status.unready(agent)))
        case _:
            return 404, "text/plain", b"there are /metrics, /healthz, /readyz and /status\n"


def _verdict(problems: list[str]) -> Answer:
    if problems:
        return 503, "text/plain; charset=utf-8", "".join(f"{problem}\n" for problem in problems).encode()
    return 200, "text/plain; charset=utf-8", b"ok\n"


def _shown(name: tuple[str, int]) -> str:
    host, port, *_ = name
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_and_port(address: str) -> tuple[str | None, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"-http-address: {address!a}: expected host:port")
    return host.strip("[]") or None, int(port)
