"""The fleet server as a program: watches, agents, pages, probes and metrics. It has no leader and writes no objects."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from accelplane.apiserver.config import Source, read_source
from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.kube.client import Client, ClientConfig
from accelplane.kube.manager import OFF, Manager
from accelplane.kube.metrics import CertificateCollector

from .fleet import Fleet
from .options import FleetOptions, PageOptions
from .serve import listen, open_gate
from .web.access import Access
from .web.gate import SecureGate, token_command_of
from .web.sessions import Claims, claims
from .web.site import Screens

log = logging.getLogger(__name__)

FIELD_MANAGER = "accelplane-fleet"


async def run(options: FleetOptions, pages: PageOptions, config: ClientConfig) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Raises `OSError` for an address that cannot be used, `CertificateError`, `NoCredentials`, and the error of any part
    that fails.
    """
    if options.agent_token and is_for_api_server(options.agent_token, config.token):
        log.warning(
            "-agent-token: %s is valid for the API server: an agent of an attacked node can use it for all rights of "
            "this account; expected a projected token with an audience of its own, and -http-audience of the agents",
            options.agent_token,
        )
    client = Client(config, field_manager=FIELD_MANAGER)
    try:
        fleet = Fleet(client, options)
        screens = Screens(fleet, grafana_url=pages.grafana_url)
        manager = Manager(client, health_address=pages.health_address or OFF, metrics_address=OFF, shutdown_delay=0.0)
        manager.add_runnable(fleet.run)
        manager.add_readyz_check("fleet", lambda: fleet.synced)
        manager.add_context(serving(client, screens, pages))
        await manager.run()
    finally:
        await client.close()


def is_for_api_server(agent_token: Source, own_token: Source | None) -> bool:
    """Whether the token for agents has an audience of the token for the API server, or has none.

    Raises `NoCredentials` for a file that cannot be read.
    """
    found, own = (
        claims(read_source(source).decode("ascii", "replace").strip()) if source else None
        for source in (agent_token, own_token)
    )
    if found is None or found == Claims():
        return False
    return not found.audiences or (own is not None and not found.audiences.isdisjoint(own.audiences))


@asynccontextmanager
async def serving(client: Client, screens: Screens, pages: PageOptions) -> AsyncGenerator[dict[str, int]]:
    """Serves the pages at their addresses; yields the ports. Raises `OSError` and `CertificateError`."""
    registry = client.metrics.registry
    ports: dict[str, int] = {}
    viewers = Gauge("accelplane_fleet_viewers", "Open pages that get updates", registry=registry)
    viewers.set_function(lambda: screens.live.viewers)
    async with AsyncExitStack() as stack:
        stack.callback(registry.unregister, viewers)
        if pages.address:
            gate = open_gate(pages.address, any_host=pages.any_host)
            listening = listen(screens, gate, pages.address, metrics=lambda: _metrics(registry))
            ports["plain"] = await _enter(stack, listening, pages.address)
        if pages.secure_address:
            gate = SecureGate(
                Access(client.server, pages.audiences),
                screens.assets.links,
                scrapers=Access(client.server) if pages.audiences else None,
                proxies=pages.proxy_names if pages.proxy_ca else None,
                token_command=token_command_of(client.namespace, pages.audiences),
            )
            tls = ServingTls(
                TlsSettings(allow_tls13=pages.allow_tls13, client_authority=pages.proxy_ca, client_optional=True)
            )
            tls.follow(pages.tls_directory)
            certificate = CertificateCollector(tls.validity)
            registry.register(certificate)
            stack.callback(registry.unregister, certificate)
            listening = listen(
                screens, gate, pages.secure_address, tls=tls.connection_context, metrics=lambda: _metrics(registry)
            )
            ports["secure"] = await _enter(stack, listening, pages.secure_address)
        yield ports


async def _enter(stack: AsyncExitStack, listening: AbstractAsyncContextManager[int], address: str) -> int:
    """Raises `OSError` with the address."""
    try:
        port = await stack.enter_async_context(listening)
    except OSError as error:
        raise OSError(error.errno, f"pages at {address}: {error.strerror or error}") from error
    log.info("pages at port %d", port)
    return port


def _metrics(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
