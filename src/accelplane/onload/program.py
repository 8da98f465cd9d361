"""The Onload operator as a program: the controller, leader election, probes, metrics and the optional webhook.

`add` adds the controller to the manager of another program instead.
"""

import logging

import msgspec

from accelplane.http.servingtls import ServingTls, TlsSettings
from accelplane.kube.admission import Hook
from accelplane.kube.client import Client, ClientConfig
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager
from accelplane.kube.webhooks import Certificate, serve
from accelplane.onload.reconciler import OnloadController
from accelplane.onload.webhooks import validator

log = logging.getLogger(__name__)

FIELD_MANAGER = "onload-operator"
LEASE = "daabde26.amd.com"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line and the environment. `image` has the device plugin and the worker.

    Without a certificate, there is no webhook. `metrics_secure` needs a certificate.
    """

    image: str
    certificate: Certificate | None = None
    webhook_port: int = 9443
    allow_tls13: bool = False
    metrics_secure: bool = False
    shutdown_delay: float = 3.0
    metrics_address: str = ":8080"
    health_address: str = ":8081"
    leader_elect: bool = False
    profiling: bool = False


async def run(options: Options, config: ClientConfig) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Raises `OSError` for a port in use, `CertificateError`, and the error of any part that fails.
    """
    client = Client(config, field_manager=FIELD_MANAGER)
    try:
        tls = ServingTls(TlsSettings(allow_tls13=options.allow_tls13)) if options.certificate else None
        manager = Manager(
            client,
            election=Election.of(LEASE, client.namespace) if options.leader_elect else None,
            health_address=options.health_address,
            metrics_address=options.metrics_address,
            metrics_tls=tls.connection_context if tls and options.metrics_secure else None,
            metrics_authorized=options.metrics_secure,
            profiling=options.profiling,
            shutdown_delay=options.shutdown_delay if tls else 0.0,
        )
        hook = add(manager, options.image)
        if tls and options.certificate:
            serve(manager, [hook], options.certificate, tls, port=options.webhook_port)
        await manager.run()
    finally:
        await client.close()


def add(manager: Manager, image: str) -> Hook:
    """Adds the controller to a manager. Returns its webhook."""
    log.info("manages Onload resources; device plugin image: %s", image)
    controller = OnloadController(manager, image)
    return validator(controller.onloads, controller.node_labels)
