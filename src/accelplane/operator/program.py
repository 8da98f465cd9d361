"""The operator as a program: the controllers of the enabled kinds, webhooks, certificates and leader election.

Controllers run in the leader only. Every replica serves webhooks, probes and metrics.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from accelplane.admission import sgx
from accelplane.admission.mapping_controller import add_fpga_admission
from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion
from accelplane.admission.sgx import SgxOptions
from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.kube.admission import Hook
from accelplane.kube.client import Client, ClientConfig
from accelplane.kube.discovery import served_kinds, stop_when_served
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager
from accelplane.kube.objects import Object
from accelplane.kube.webhooks import Certificate, serve
from accelplane.operator.controller import PluginController, controllers
from accelplane.operator.resources import KINDS
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


class Extension(msgspec.Struct, frozen=True):
    """`add` adds controllers of `kinds` and a cache of all nodes to a manager, and returns their webhooks."""

    kinds: Sequence[type[Object]]
    add: Callable[[Manager], Iterable[Hook]]


async def run(options: Options, config: ClientConfig, extend: Extension | None = None) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises `OSError` for a port in use, `CertificateError`, and the error of any part that fails.
    """
    client = Client(config, field_manager=FIELD_MANAGER)
    try:
        names = (AcceleratorFunction, FpgaRegion) if "fpga" in options.families else ()
        served = await served_kinds(client, [*(KINDS[family] for family in options.families), *names])
        families = [family for family in options.families if KINDS[family] in served]
        named = bool(names) and all(kind in served for kind in names)
        # If none is served, the definitions are probably applied later. Until then the readiness probe fails.
        chosen = msgspec.structs.replace(options, families=families or options.families)
        missing = await _missing(client, extend)
        manager = _manager(client, chosen, None if missing else extend, named=named)
        if missing:
            # The other kinds do not wait for a kind of another product.
            manager.add_runnable(partial(stop_when_served, client, missing, manager.stop))
        await manager.run()
    finally:
        await client.close()


async def _missing(client: Client, extend: Extension | None) -> list[type[Object]]:
    """The kinds of the extension that are not served."""
    if extend is None:
        return []
    served = await served_kinds(client, extend.kinds)
    return [kind for kind in extend.kinds if kind not in served]


def _manager(client: Client, options: Options, extend: Extension | None, *, named: bool) -> Manager:
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
    found = [*_hooks(manager, by_family, options, named=named), *(extend.add(manager) if extend is not None else ())]
    serve(manager, found, options.certificate, tls, port=options.webhook_port)
    log.info("kinds: %s; DaemonSets in namespace %s", ", ".join(options.families), options.settings.namespace)
    return manager


def _hooks(
    manager: Manager, by_family: Mapping[str, PluginController], options: Options, *, named: bool
) -> Iterator[Hook]:
    yield from hooks(by_family, options.settings.images)
    if "sgx" in by_family:
        yield sgx.mutator(options.sgx)
    if named:
        # Every replica knows all names before it is ready. Only the leader writes statuses.
        yield from add_fpga_admission(manager, options.settings.fpga_naming)
