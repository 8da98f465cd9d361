"""The operator as a program: the controllers of the enabled kinds, webhooks, certificates and leader election.

Controllers run in the leader only. Every replica serves webhooks, probes and metrics.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from accelplane.admission import deviceconfig, sgx
from accelplane.admission.mapping_controller import add_fpga_admission
from accelplane.admission.sgx import SgxOptions
from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.kube.admission import Hook
from accelplane.kube.client import Client, ClientConfig
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager
from accelplane.kube.webhooks import Certificate, serve
from accelplane.operator.controller import PluginController, controllers
from accelplane.operator.settings import Settings
from accelplane.operator.webhooks import hooks

log = logging.getLogger(__name__)

FIELD_MANAGER = "accelplane-operator"
LEASE = "d1c7b6d5.intel.com"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line and the environment."""

    families: Sequence[str]
    settings: Settings
    certificate: Certificate
    sgx: SgxOptions
    webhook_port: int = 9443
    allow_tls13: bool = False
    metrics_address: str = ":8080"
    metrics_secure: bool = False
    health_address: str = ":8081"
    leader_elect: bool = False
    shutdown_delay: float = 3.0
    profiling: bool = False


# Adds controllers and a cache of all nodes to a manager, and returns their webhooks.
Extension = Callable[[Manager], Iterable[Hook]]


async def run(options: Options, config: ClientConfig, extend: Extension | None = None) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises `OSError` for a port in use, `CertificateError`, and the error of any part that fails.
    """
    client = Client(config, field_manager=FIELD_MANAGER)
    try:
        manager = _manager(client, options, extend)
        await manager.run()
    finally:
        await client.close()


def _manager(client: Client, options: Options, extend: Extension | None) -> Manager:
    tls = ServingTls(TlsSettings(allow_tls13=options.allow_tls13))
    manager = Manager(
        client,
        election=Election.of(LEASE, client.namespace) if options.leader_elect else None,
        health_address=options.health_address,
        metrics_address=options.metrics_address,
        metrics_tls=tls.connection_context if options.metrics_secure else None,
        metrics_authorized=options.metrics_secure,
        profiling=options.profiling,
        shutdown_delay=options.shutdown_delay,
    )
    by_family = controllers(manager, options.families, options.settings, requires_nodes=extend is not None)
    found = [*_hooks(manager, by_family, options), *(extend(manager) if extend is not None else ())]
    serve(manager, found, options.certificate, tls, port=options.webhook_port)
    log.info("kinds: %s; DaemonSets in namespace %s", ", ".join(options.families), options.settings.namespace)
    return manager


def _hooks(manager: Manager, by_family: Mapping[str, PluginController], options: Options) -> Iterator[Hook]:
    yield from hooks(by_family, options.settings)
    yield deviceconfig.validator()
    if "sgx" in by_family:
        yield sgx.mutator(options.sgx)
    if "fpga" in by_family:
        # Every replica knows all names before it is ready. Only the leader writes statuses.
        yield from add_fpga_admission(manager, options.settings.fpga_naming)
