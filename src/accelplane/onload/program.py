"""The Onload operator as a program: the controller, the webhook, leader election, probes and metrics.

`add` adds the controller to the manager of another program instead. The webhook is served if there is a certificate.
"""

import logging

import msgspec

from accelplane.kube.admission import Hook
from accelplane.kube.client import Client, ClientConfig
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager
from accelplane.kube.tls import ServingTls, TlsSettings
from accelplane.kube.webhooks import Certificate, serve
from accelplane.onload.reconciler import OnloadController
from accelplane.onload.webhooks import validator

log = logging.getLogger(__name__)

FIELD_MANAGER = "onload-operator"
LEASE = "daabde26.amd.com"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line and the environment. `image` has the device plugin and the worker.

    Without a certificate, no webhook is served.
    """

    image: str
    certificate: Certificate | None = None
    webhook_port: int = 9443
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
        manager = Manager(
            client,
            election=Election.of(LEASE, client.namespace) if options.leader_elect else None,
            health_address=options.health_address,
            metrics_address=options.metrics_address,
            profiling=options.profiling,
        )
        hook = add(manager, options.image)
        if options.certificate is not None:
            serve(manager, [hook], options.certificate, ServingTls(TlsSettings()), port=options.webhook_port)
        await manager.run()
    finally:
        await client.close()


def add(manager: Manager, image: str) -> Hook:
    """Adds the controller to a manager. Returns its webhook."""
    log.info("manages Onload resources; device plugin image: %s", image)
    controller = OnloadController(manager, image)
    return validator(controller.resources, controller.node_labels)
